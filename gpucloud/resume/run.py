"""A training run that can be interrupted at any step and continues exactly there."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler

from gpucloud.domain.checkpoint.manifest import Level, Promise
from gpucloud.domain.errors import CredentialsError, StoreError, UsageError
from gpucloud.resume.batches import Batches
from gpucloud.resume.folder import AttemptFolder, Progress, say
from gpucloud.resume.leaving import Leaving
from gpucloud.resume.loader import Loader, require_split
from gpucloud.resume.profiling import Profiling, Trying
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.reading import Put, unlike
from gpucloud.resume.restoring import Restored, find
from gpucloud.resume.save.cadence import Schedules, Window, Windows
from gpucloud.resume.save.capture import Capture
from gpucloud.resume.save.keeping import Keeper, Moment, Pauses
from gpucloud.resume.save.saving import Saver
from gpucloud.resume.save.writer import Writer
from gpucloud.resume.settings import Settings, promised, read_settings, surroundings, tuned
from gpucloud.resume.state import randomness
from gpucloud.resume.state.state import TrainingState
from gpucloud.resume.state.traits import rebuckets
from gpucloud.resume.state.tree import Shares
from gpucloud.resume.wrapped import Wrapped, source_of
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints

_OURS = {
    "batch_size": "global_batch=…: the samples of a step over all ranks",
    "batch_sampler": "shuffle=False, and a data set in the order that you want",
    "sampler": "shuffle=False, and a data set in the order that you want",
    "drop_last": "leave it out: the last samples of an epoch that fill no step are left out",
    "generator": "resume.init(seed=…)",
}
"""Options of torch's DataLoader that say which samples come when, and what to write instead."""

_newest: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""The run of this process that `init` returned last, by its attempt."""


def init(
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    total_steps: int | None = None,
    seed: int = 0,
    **others: Any,
) -> Run:
    """Return the run, its state restored from the newest whole checkpoint, or fresh.

    Call it on every rank, after the process group and everything with state is made: a model that is sharded, by
    `fully_shard` or `parallelize_module`, must be so already. `others` are further objects with state_dict() and
    load_state_dict(), and generators of the script's own. `seed`, the same on all ranks, orders the data of
    `run.loader` and seeds every rank's random number generators with it, each otherwise. Raises UsageError when the
    checkpoint does not fit, StoreError when the store does not answer.
    """
    settings = read_settings()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **others}
    state = TrainingState({name: part for name, part in parts.items() if part is not None})
    anew = any(rebuckets(part) for part in parts.values() if isinstance(part, torch.nn.Module))
    return Run(settings, state, total_steps=total_steps, seed=seed, rebuckets=anew)


_NO_LOADER = Promise(
    Level.BEST_EFFORT, "without `run.loader` or `run.wrap`, which samples come next is up to the script"
)


_NO_GRADIENT = (
    "its optimizer steps with gradients that were there before the last `run.step()`, which no checkpoint has"
)


_LATE_SCHEDULE = "a schedule's step comes after `run.step()`, so that no checkpoint has it: call it before"


_AHEAD = "batches are taken before the step ahead of them ends, as a prefetcher does, and a resume leaves those out"


_BETWEEN = "it was saved after a schedule's step at the end of an epoch, which is done once more: evaluate before it"


_REGROUPED = Promise(
    Level.SAME_SAMPLES, "DDP groups gradients anew in its first steps, which are not taken back between two epochs"
)


class Run:
    """One attempt's part of a job, on this rank. Steps count from 1; `steps_done` is the last one done."""

    _epoch: int | None = None  # of `epochs`
    _epochs: int | None = None
    _randomness_set = False
    _after_step: dict[str, Any] | None = None  # the generators, as the last step left them
    _put: Put | None = None  # until the first step
    _taken_back = 0  # steps, of a window of gradients that is still open
    _between_epochs: str | None = None  # what the state says of itself there, with steps to be taken back
    _is_fresh = False
    _seeds = True  # the generators; a script with a loader of its own does so itself
    _schedules: Schedules  # from the loader on

    def __init__(
        self, settings: Settings, state: TrainingState, *, total_steps: int | None, seed: int, rebuckets: bool
    ) -> None:
        self._total_steps = total_steps
        self._promise = Promise()
        self._reasons: set[str] = set()
        self._settings = settings
        self._state = state
        self._seed = seed
        self._folder = AttemptFolder(settings.folder)
        self._ranks = Ranks()
        self._surroundings = surroundings(self._ranks.world, state.arrangement)
        self._data_ranks = self._ranks.rank, self._ranks.world
        self._loader: Batches | None = None
        self._checkpoints = Checkpoints(open_store(settings.store), settings.prefix, keep=settings.keep)
        self._trying = Trying(settings.trial)
        capture = Capture(state, self._ranks)
        writer = Writer(settings.store, settings.prefix, settings.keep, capture.save_buffer.descriptor)
        if self._ranks.rank == 0:
            self._checkpoints.announce(settings.attempt)
        with randomness.kept(), self._barred():  # what the script draws next is the same whether it resumes or not
            restored = find(self._checkpoints, self._ranks, state)
            self._own = self._put_back(restored) if restored else {}
        self.steps_done = self._first_step = restored.commit.step if restored else 0
        self._is_fresh = restored is None
        self._restored = restored if rebuckets else None
        self._vain_steps = _vain_steps(self._ranks)
        self._windows = Windows(state.optimizers, state.modules, self._own.get("longest_window", 0))
        saver = Saver(self._checkpoints, writer, capture, self._ranks, committed=self.steps_done)
        self._keeper = Keeper(settings.cadence, self._checkpoints, saver, self._ranks, self._folder)
        self._keeper.of_a_trial = settings.trial is not None
        self._progress = Progress(self._folder if self._ranks.rank == 0 else AttemptFolder(None), self)
        self._keeper.progress = self._progress
        self._pauses = Pauses(self._keeper, self._ranks, self._folder)
        self._profiling = Profiling(self._folder, settings.profile_steps, self._ranks.rank)
        _newest[settings.attempt] = self
        if self._ranks.rank == 0:
            self._begin(restored)

    @property
    def rank(self) -> int:
        """This process among all that train, from 0."""
        return self._ranks.rank

    @property
    def total_steps(self) -> int | None:
        """How many steps the run has; by its epochs where nobody said, and None where their length is not known."""
        loader = self._loader
        if self._total_steps is not None or self._epochs is None or loader is None or not (length := loader.length):
            return self._total_steps
        to_come = (self._epochs - loader.trained.epoch) * length - loader.trained.batch
        done = self.steps_done - self._first_step
        each = loader.trained_batches / done if done and loader.trained_batches else 1.0
        return self.steps_done + max(0, round(to_come / each))

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the loader's last batch; of that before the resume, where there is none yet."""
        if self._epoch is not None:
            return self._epoch
        if self._loader is not None:
            return self._loader.epoch
        place: dict[str, int] = self._own.get("loader") or {"epoch": 0, "used": 0}
        return max(place["epoch"] - (not place["used"]), 0)

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint that counts; 0 when there is none."""
        return self._keeper.committed

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        num_workers: int = 0,
        shuffle: bool = True,
        over: Any = None,
        **options: Any,
    ) -> Loader:
        """Return the run's batches, from the next one on; `options` go to torch's DataLoader.

        `global_batch` is the number of samples in a step over all ranks: keep it, and the same samples make the
        same steps on any number of ranks. With tensor parallelism, where some ranks train on the same samples, `over`
        is the dimension of the device mesh over which batches are split, as `mesh["data"]`; ranks that share their
        samples then draw the same random numbers. Within `run.epochs` a `for` ends with the epoch, else with the run's
        `total_steps`. Raises UsageError for a second loader, where ranks disagree on the order of samples, and when it
        cannot be split: neither over these ranks nor, in a job on a range of nodes, over any number of them that it may
        come to. The first step raises it where nothing says when the run ends.
        """
        self._require_no_loader()
        for name, instead in _OURS.items():
            if name in options:
                raise UsageError(f"run.loader({name}=…): the run itself makes that", hint=instead)
        if over is not None:
            self._data_ranks = over.get_local_rank(), over.size()
        else:
            require_split(global_batch, self._settings.worlds)
        loader = Loader(
            dataset,
            global_batch=global_batch,
            ranks=self._data_ranks,
            seed=self._seed,
            shuffle=shuffle,
            options={"num_workers": num_workers, **options},
        )
        loader.by_epoch = self._epoch is not None
        self._take_from(loader, dataset, in_workers=num_workers > 0)
        return loader

    def wrap(self, loader: Any, *, over: Any = None) -> Wrapped:
        """Return the batches of a loader of your own, from the one after the last step on; `for` ends with the epoch.

        Torch's DataLoader with any sampler continues exactly, and so does what has `state_dict()` or can be read again,
        as far as `docs/scripts-and-checkpoints` tells; what makes it less is said. A function that returns an iterable
        will do as well. Your own seeds count; samples of a map-style set draw random numbers by the run's seed, the
        epoch and their place in it. With tensor parallelism, `over` is the dimension of the device mesh over which your
        loader splits its batches. Raises UsageError for a second loader, and where ranks' loaders do not go together.
        """
        self._require_no_loader()
        if over is not None:
            self._data_ranks = over.get_local_rank(), over.size()
        source = source_of(loader, self._seed, self._data_ranks[0])
        wrapped = Wrapped(
            source, self._ranks.world, lambda why: self._lower(Promise(Level.BEST_EFFORT, why)), self._say
        )
        if self._own and self._own["surroundings"]["world"] != self._ranks.world:
            self._lower(
                Promise(Level.BEST_EFFORT, "on another number of ranks your own loader hands out other batches")
            )
        if over is None and self._ranks.world > 1 and (whole := _takes_all(loader)):
            self._say(f"{whole} has every rank draw from the whole data set: torch's DistributedSampler splits it")
        self._seeds = False
        self._take_from(wrapped, getattr(loader, "dataset", None), in_workers=bool(getattr(loader, "num_workers", 0)))
        if not source.can_wait:
            wrapped.wait = contextlib.nullcontext()
        if source.lacks:
            self._lower(Promise(Level.BEST_EFFORT, source.lacks))
        return wrapped

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`; inside, a `for` over the run's loader ends with the epoch.

        A run that was interrupted in an epoch begins with it, and its `for` has what is left of it: nothing, where the
        last step was its last, so that what follows the `for` is done.
        """
        place = self._own.get("loader") or {"epoch": 0}
        self._epochs = count
        for epoch in range(place["epoch"] if self._loader is None else self._loader.handed.epoch, count):
            if self._total_steps is not None and self.steps_done >= self._total_steps:
                return
            self._epoch = epoch
            if self._loader is not None:
                self._loader.by_epoch = True
                self._loader.enter(epoch)
            yield epoch

    def _require_no_loader(self) -> None:
        self._pauses.over()
        if self._loader is not None:
            raise UsageError("a run has one loader", hint="use torch's DataLoader for evaluation data")

    def _take_from(self, loader: Batches, dataset: Any, *, in_workers: bool) -> None:
        """Have this be what the run's batches come from."""
        self._require_one_order(loader)
        if own := self._state.own_generator(dataset, in_workers=in_workers):
            self._lower(Promise(Level.BEST_EFFORT, own))
        position = self._own.get("loader")
        if position and (changed := loader.load_state_dict(position)):
            self._lower(Promise(Level.BEST_EFFORT, ", ".join(changed)))
        self._schedules = Schedules(self._state.others)
        loader.begin = self._begin_batches
        loader.asked = self._go_on_as_the_step_left
        loader.opened = self._progress.batch_wanted
        loader.over = self._epoch_is_over
        loader.waited = self._progress.waited
        loader.wait = self._pauses.stalls(self._at_rest)
        loader.ended = lambda: self._total_steps is not None and self.steps_done >= self._total_steps
        self._loader = loader

    def step(self, *, loss: Any = None) -> None:
        """Say that a step is done; `loss` (number or tensor) is for reports.

        Saves when it is due, or when the agent of any node wishes it: copies the state, and the rest goes on beside the
        training. When an agent asks to stop, all ranks save this step, wait until it counts and leave: SystemExit(75).
        All that belongs to the step comes before it, `scheduler.step()` too: a checkpoint has what was until here. What
        is drawn between it and the next batch, as an evaluation does, changes no number that training draws.
        Where gradients are gathered over several steps, saving and leaving wait for the optimizer's next step. With DDP
        over three or more ranks (on GPUs: two), the first step or steps after a resume are taken back and their batches
        handed out again.
        Raises Fenced when another attempt has taken over, UsageError when `init` was called once more meanwhile.
        """
        if _newest.get(self._settings.attempt) is not self:
            raise UsageError(
                "resume.init was called again in this process, and only the newest run can save",
                hint="call it once, with all that has a state: resume.init(model=…, other=…)",
            )
        self._pauses.over()
        if self._loader is None:
            self._go_on_without_loader()
        else:
            self._require_an_end()
        window = self._windows.now()
        if self._in_vain(window):
            return
        self.steps_done += 1
        if self._loader is not None:
            self._loader.stepped()
            self._schedules.stepped()
            self._after_step = randomness.capture_again(self._after_step)
        self._see_what_it_took()
        self._progress.stepped(loss)
        self._trying.stepped(loss)
        if not self._profiling.over:
            with self._progress.phase("profile"):
                self._profiling.stepped()
        if self._keeper.keep(self.steps_done, self._moment, window):
            self._leaving.leave(self.steps_done)
        if self._settings.trial is not None:
            self._leaving.try_(self._settings.trial, self.steps_done, self._progress, is_fresh=self._is_fresh)

    @property
    def level(self) -> Level:
        """What a resume from what is saved now can promise, as far as is known."""
        return self._promise.level

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report that something else than training goes on inside (`evaluate`), so that nobody takes it for a hang.

        A notice that comes meanwhile is heeded: the last step is saved, where all ranks are in a phase after it, also
        those that only wait for the one that evaluates. Raises what `step` does.
        """
        with self._progress.phase(name), self._pause():
            yield

    def _pause(self) -> contextlib.AbstractContextManager[None]:
        at = self._at_rest()
        return self._pauses.during(*at) if at is not None else contextlib.nullcontext()

    def _at_rest(self) -> tuple[int, Callable[[], Moment]] | None:
        """Return after which step the state is as a save needs it, and what beside it; None in the midst of a step."""
        begun = self._loader is not None and not self._nothing_is_handed_out
        if begun or not self._windows.rests or _newest.get(self._settings.attempt) is not self:
            return None
        return self.steps_done, self._moment

    def done(self) -> None:
        """Commit the final state, then say that the job is done: nothing else counts as success. Raises StoreError."""
        self._pauses.over()
        self._leaving.done(self.steps_done, self._progress)

    @property
    def _leaving(self) -> Leaving:
        return Leaving(self._folder, self._ranks, self._keeper, self._profiling, self._moment)

    def _put_back(self, restored: Restored) -> dict[str, Any]:
        self._require_steps_left(restored.commit.step)
        content = restored.content(self._ranks.rank)
        self._state.fit(content, restored.commit.step)
        if late := self._state.change(content.own.get("changed", {})):
            self._lower(Promise(Level.BEST_EFFORT, late))
        self._trying.put_back(content.own)
        self._lower(restored.manifest.promise)
        self._lower(promised(content.own["surroundings"], self._surroundings))
        for optimizer in self._state.optimizers:  # it has stepped: torch need not warn of a schedule that goes on now
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        shares = Shares(self._ranks) if self._state.sharded else None
        self._put = Put(self._state.present())
        if why := unlike(restored.saved(self._ranks.rank), self._put, self._ranks, shares):
            self._lower(Promise(Level.BEST_EFFORT, why))
        if content.own_rank != self._ranks.rank or content.own["surroundings"]["world"] != self._ranks.world:
            del content.own["randomness"]
        return content.own

    def _require_steps_left(self, step: int) -> None:
        """UsageError for a checkpoint of a longer run than this one: it would be done before it begins."""
        if self._total_steps is not None and step > self._total_steps:
            raise UsageError(
                f"the checkpoint is of step {step}, and this run has {self._total_steps} steps: it is over already",
                hint="raise total_steps, or give the job file another `name:` to begin at step 0",
            )

    def _begin(self, restored: Restored | None) -> None:
        base = restored.commit if restored else None
        if not self._checkpoints.begin(base=base, attempt=self._settings.attempt):
            say("this store ignores conditional writes: two attempts at once would not notice each other")
        if restored:
            say(f"resumed from step {restored.commit.step}, {self.level.value} (attempt {self._settings.attempt})")
        elif self._settings.folder is not None and self._settings.trial is None and self._ranks.rank == 0:
            say("begins at step 0; `gpucloud train --verify-resume` proves that a script resumes to the bit")

    @contextlib.contextmanager
    def _barred(self) -> Iterator[None]:
        """What cannot be read now may be later, or elsewhere: the job tries again, and is not over."""
        try:
            yield
        except (StoreError, CredentialsError) as error:
            self._folder.tell(f"barred-{self._ranks.rank}.json", {"why": str(error)})
            raise

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            say(text)

    def _lower(self, promise: Promise) -> None:
        if promise.reason and promise.reason not in self._reasons and self._ranks.rank == 0:
            told = "a resume from what is saved" if self._is_fresh else "this resume"
            say(f"{told} is {promise.level.value}, not exact: {promise.reason}")
        self._reasons.add(promise.reason)
        self._promise = self._promise.weaker(promise)

    def _require_an_end(self) -> None:
        if self._total_steps is None and self._epochs is None:
            raise UsageError(
                "batches come without end, and nothing says how many steps the run has",
                hint="for epoch in run.epochs(10): around it, or resume.init(total_steps=…)",
            )

    def _epoch_is_over(self) -> None:
        """See to it that no step is taken back to before that."""
        if self._restored is None or not self._vain_steps or self._loader is None:
            return
        self._between_epochs = self._state.told()
        if self._taken_back:  # steps of a window of gradients that the epoch ends in: they count after all
            self._take_nothing_back()
            self.steps_done += self._taken_back
            self._loader.stepped()
            self._after_step = randomness.capture()

    def _ended_an_epoch(self, why: str | None) -> bool:
        """Whether the script changed anything between epochs, as a schedule's step does: it must not be taken back."""
        return self._between_epochs is not None and (bool(why) or self._state.told() != self._between_epochs)

    def _take_nothing_back(self) -> None:
        self._restored = None
        self._lower(_REGROUPED)

    def _require_one_order(self, loader: Batches) -> None:
        """Ranks that order the samples each in its own way would train on some twice, and on others never."""
        rules = {**loader.rules, "total_steps": self._total_steps}
        told = [json.loads(one) for one in self._ranks.gathered(json.dumps(rules).encode())]
        for rank, theirs in enumerate(told):
            for name, ours in told[0].items():
                if theirs[name] != ours:
                    one_for_all = "resume.init(seed=…): the same on all ranks, each then draws its own random numbers"
                    raise UsageError(
                        f"the ranks differ in {name}: {ours} on rank 0, {theirs[name]} on rank {rank}",
                        hint=one_for_all if name == "seed" else f"give every rank the same {name}",
                    )

    def _begin_batches(self) -> None:
        # Whatever the script drew since `init`, the first batch finds the generators as the last step left them; and so
        # it does again after batches that the script only looked at.
        if self.steps_done == self._first_step and self._nothing_is_handed_out:
            self._randomness_set = False
            why = self._put.changed(self._state.present()) if self._put is not None else None
            if why and self._restored is None:
                self._lower(Promise(Level.BEST_EFFORT, why))
            elif self._restored is not None and self._ended_an_epoch(why):
                self._take_nothing_back()
        self._set_randomness()
        self._progress.batch_wanted()

    @property
    def _nothing_is_handed_out(self) -> bool:
        """Whether the next batch is the first of those that the next step takes."""
        return self._loader is not None and not self._loader.untrained

    def _go_on_as_the_step_left(self, first_of_epoch: bool) -> None:  # noqa: FBT001
        """Have the next batch find the generators as the last step left them: a resumed run does not draw again what
        was drawn since, as an evaluation does.
        """
        if not self._nothing_is_handed_out:
            return
        if not (first_of_epoch and self._loader is not None and self._loader.by_epoch) and self._schedules.late():
            self._lower(Promise(Level.BEST_EFFORT, _LATE_SCHEDULE))
        if self._after_step is not None and not randomness.stands(self._after_step):
            randomness.put_back(self._after_step)

    def _go_on_without_loader(self) -> None:
        """No number is drawn again that steps before the resume drew, but for those of the first step."""
        if "randomness" in self._own and not self._randomness_set:
            self._lower(_NO_LOADER)
            self._set_randomness()

    def _see_what_it_took(self) -> None:
        """Lower the promise if the attempt's first steps took gradients of the step before, or batches of the next."""
        self._put = None
        if self._loader is not None and self._loader.ahead:
            self._lower(Promise(Level.BEST_EFFORT, _AHEAD))
        if self._windows.found_nothing:
            self._lower(Promise(Level.BEST_EFFORT, _NO_GRADIENT))

    def _set_randomness(self) -> None:
        if self._randomness_set:
            return
        self._randomness_set = True
        if "randomness" in self._own:
            randomness.put_back(self._own["randomness"])
        elif self._seeds or self._own:
            randomness.seed_all(randomness.mix(self._seed, self.steps_done), self._data_ranks[0])

    def _in_vain(self, window: Window) -> bool:
        """Whether the step just done is one that is taken back; what counts are those of the optimizer."""
        restored = self._restored
        if restored is None or self._loader is None or not self._vain_steps:
            self._restored = None
            return False
        (still,) = self._ranks.highest(window)
        self._vain_steps -= not still
        self._taken_back = self._taken_back + 1 if still else 0
        if self._vain_steps:
            # A schedule may end with the run's last step, so it is not to go on.
            self._state.apply_others(restored.content(self._ranks.rank))
            if self._loader.by_epoch and not still:  # the epoch may end before all are done
                self._loader.go_back(self._own["loader"])
        else:
            self._restored = None
            self._own = self._put_back(restored)
            self._loader.go_back(self._own["loader"])
            self._randomness_set, self._after_step = False, None
        return True

    def _moment(self) -> Moment:
        lacks = self._windows.lacks
        promise = self._promise if self._loader is not None else self._promise.weaker(_NO_LOADER)
        promise = promise.weaker(tuned()) if lacks is None else Promise(Level.BEST_EFFORT, lacks)
        if self._loader is not None and self._loader.trained.over and self._schedules.moved:
            promise = promise.weaker(Promise(Level.BEST_EFFORT, _BETWEEN))
        return Moment(
            step=self.steps_done,
            promise=promise,
            lacks=lacks,
            steps_are_seen=self._windows.seen,
            own={
                "longest_window": self._windows.longest,
                "randomness": self._after_step or randomness.capture(),
                "loader": self._loader.state_dict() if self._loader is not None else None,
                "surroundings": self._surroundings,
                "changed": self._state.changed(),
                **self._trying.state(),
            },
        )


def _takes_all(loader: Any) -> str | None:
    """Return the sampler's name where every rank has one that knows of no other."""
    sampler = getattr(loader, "sampler", None)
    return type(sampler).__name__ if type(sampler) in (RandomSampler, SequentialSampler) else None


def _vain_steps(ranks: Ranks) -> int:
    """Return how many steps after a resume are done in vain and taken back, where DDP groups gradients anew.

    DDP regroups its gradients after the first backward pass. Sums of three or more numbers then round differently, and
    with NCCL those of two do: measured on four H200, weights are bit-equal after three passes of the very step that
    is trained, with its autocast, and are not after two without it.
    """
    if ranks.device.type == "cuda":
        return 3 if ranks.world > 1 else 0
    return 1 if ranks.world > 2 else 0
