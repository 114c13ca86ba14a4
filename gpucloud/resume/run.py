"""A training run that can be interrupted at any step and continues exactly there."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from gpucloud.domain.checkpoint.manifest import Level, Promise
from gpucloud.domain.errors import CredentialsError, StoreError, UsageError
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


_NO_LOADER = Promise(Level.BEST_EFFORT, "without `run.loader`, which samples come next is up to the script")


_NO_GRADIENT = (
    "its optimizer steps with gradients that were there before the last `run.step()`, which no checkpoint has"
)


_LATE_SCHEDULE = "a schedule's step comes after `run.step()`, so that no checkpoint has it: call it before"


_AHEAD = "batches are taken before the step ahead of them ends, as a prefetcher does, and a resume leaves those out"


class Run:
    """One attempt's part of a job, on this rank. Steps count from 1; `steps_done` is the last one done."""

    _randomness_set = False
    _after_step: dict[str, Any] | None = None  # the generators, as the last step left them
    _put: Put | None = None  # until the first step
    _is_fresh = False
    _schedules: Schedules  # from the loader on

    def __init__(
        self, settings: Settings, state: TrainingState, *, total_steps: int | None, seed: int, rebuckets: bool
    ) -> None:
        self.total_steps = total_steps
        self._promise = Promise()
        self._reasons: set[str] = set()
        self._settings = settings
        self._state = state
        self._seed = seed
        self._folder = AttemptFolder(settings.folder)
        self._ranks = Ranks()
        self._surroundings = surroundings(self._ranks.world, state.arrangement)
        self._data_ranks = self._ranks.rank, self._ranks.world
        self._loader: Loader | None = None
        self._checkpoints = Checkpoints(open_store(settings.store), settings.prefix, keep=settings.keep)
        self._trying = Trying(settings.trial)
        capture = Capture(state, self._ranks)
        writer = Writer(settings.store, settings.prefix, settings.keep, capture.save_buffer.descriptor)
        if self._ranks.rank == 0:
            self._checkpoints.announce(settings.attempt)
        with randomness.kept(), self._barred():  # what the script draws next is the same whether it resumes or not
            restored = find(self._checkpoints, self._ranks, state)
            self._own = self._put_back(restored) if restored else {}
        self.steps_done = restored.commit.step if restored else 0
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
    def epoch(self) -> int:
        """The epoch, from 0, of the loader's last batch; of that before the resume, where there is none yet."""
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
        samples then draw the same random numbers. Raises UsageError for a second loader, without `total_steps`, where
        ranks disagree on the order of samples, and when it cannot be split: neither over these ranks nor, in a job on a
        range of nodes, over any number of them that it may come to.
        """
        self._pauses.over()
        if self._loader is not None:
            raise UsageError("a run has one loader", hint="use torch's DataLoader for evaluation data")
        for name, instead in _OURS.items():
            if name in options:
                raise UsageError(f"run.loader({name}=…): the run itself makes that", hint=instead)
        if self.total_steps is None:
            raise UsageError(
                "batches come without end, and nothing says how many steps the run has",
                hint="resume.init(total_steps=EPOCHS * (len(dataset) // GLOBAL_BATCH))",
            )
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
        self._require_one_order(loader)
        if own := self._state.own_generator(dataset, in_workers=num_workers > 0):
            self._lower(Promise(Level.BEST_EFFORT, own))
        position = self._own.get("loader")
        if position and (changed := loader.load_state_dict(position)):
            self._lower(Promise(Level.BEST_EFFORT, ", ".join(changed)))
        loader.begin = self._begin_batches
        self._schedules = Schedules(self._state.others)
        loader.asked = self._go_on_as_the_step_left
        loader.waited = self._progress.waited
        loader.wait = self._pauses.stalls(self._at_rest)
        last = self.total_steps
        loader.ended = lambda: self.steps_done >= last
        self._loader = loader
        return loader

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
        shares = Shares(self._ranks) if self._state.sharded else None
        self._put = Put(self._state.present())
        if why := unlike(restored.saved(self._ranks.rank), self._put, self._ranks, shares):
            self._lower(Promise(Level.BEST_EFFORT, why))
        if content.own_rank != self._ranks.rank or content.own["surroundings"]["world"] != self._ranks.world:
            del content.own["randomness"]
        return content.own

    def _require_steps_left(self, step: int) -> None:
        """UsageError for a checkpoint of a longer run than this one: it would be done before it begins."""
        if self.total_steps is not None and step > self.total_steps:
            raise UsageError(
                f"the checkpoint is of step {step}, and this run has {self.total_steps} steps: it is over already",
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

    def _lower(self, promise: Promise) -> None:
        if promise.reason and promise.reason not in self._reasons and self._ranks.rank == 0:
            told = "a resume from what is saved" if self._is_fresh else "this resume"
            say(f"{told} is {promise.level.value}, not exact: {promise.reason}")
        self._reasons.add(promise.reason)
        self._promise = self._promise.weaker(promise)

    def _require_one_order(self, loader: Loader) -> None:
        """Ranks that order the samples each in its own way would train on some twice, and on others never."""
        rules = {**loader.rules, "total_steps": self.total_steps}
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
        if self._after_step is None and self._nothing_is_handed_out:
            self._randomness_set = False
            if self._put is not None and self._restored is None and (why := self._put.changed(self._state.present())):
                self._lower(Promise(Level.BEST_EFFORT, why))
        self._set_randomness()
        self._progress.batch_wanted()

    @property
    def _nothing_is_handed_out(self) -> bool:
        """Whether the next batch is the first of those that the next step takes."""
        return self._loader is not None and self._loader.batches == self._loader.trained

    def _go_on_as_the_step_left(self) -> None:
        """Have the next batch find the generators as the last step left them: a resumed run does not draw again what
        was drawn since, as an evaluation does.
        """
        if not self._nothing_is_handed_out:
            return
        if self._schedules.late():
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
        else:
            randomness.seed_all(randomness.mix(self._seed, self.steps_done), self._data_ranks[0])

    def _in_vain(self, window: Window) -> bool:
        """Whether the step just done is one that is taken back; what counts are those of the optimizer."""
        restored = self._restored
        if restored is None or self._loader is None or not self._vain_steps:
            self._restored = None
            return False
        (still,) = self._ranks.highest(window)
        self._vain_steps -= not still
        if self._vain_steps:
            # A schedule may end with the run's last step, so it is not to go on.
            self._state.apply_others(restored.content(self._ranks.rank))
        else:
            self._restored = None
            self._own = self._put_back(restored)
            self._loader.load_state_dict(self._own["loader"])
            self._loader.go_back()
            self._randomness_set, self._after_step = False, None
        return True

    def _moment(self) -> Moment:
        lacks = self._windows.lacks
        promise = self._promise if self._loader else self._promise.weaker(_NO_LOADER)
        promise = promise.weaker(tuned()) if lacks is None else Promise(Level.BEST_EFFORT, lacks)
        return Moment(
            step=self.steps_done,
            promise=promise,
            lacks=lacks,
            steps_are_seen=self._windows.seen,
            own={
                "longest_window": self._windows.longest,
                "randomness": self._after_step or randomness.capture(),
                "loader": self._loader.state_dict() if self._loader else None,
                "surroundings": self._surroundings,
                "changed": self._state.changed(),
                **self._trying.state(),
            },
        )


def _vain_steps(ranks: Ranks) -> int:
    """Return how many steps after a resume are done in vain and taken back, where DDP groups gradients anew.

    DDP regroups its gradients after the first backward pass. Sums of three or more numbers then round differently, and
    with NCCL those of two do: measured on four H200, weights are bit-equal after three passes of the very step that
    is trained, with its autocast, and are not after two without it.
    """
    if ranks.device.type == "cuda":
        return 3 if ranks.world > 1 else 0
    return 1 if ranks.world > 2 else 0
