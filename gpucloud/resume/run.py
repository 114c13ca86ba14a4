"""A training run that can be interrupted at any step and continues exactly there."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from gpucloud.domain.checkpoint.manifest import MOST_VALUES, Level, Notes, Promise
from gpucloud.domain.errors import CredentialsError, StoreError, UsageError
from gpucloud.domain.job.quantities import format_size
from gpucloud.resume.attempt import Continued, Exactness, Leaving, export, require_steps_left, warn_of_nothing_left
from gpucloud.resume.batches import Batches, Wrapped
from gpucloud.resume.feed import Feed, drawn_alike, other_share, takes_all
from gpucloud.resume.folder import AttemptFolder, Progress, Signals, say
from gpucloud.resume.loader import Loader, require_split
from gpucloud.resume.profiling import Profiling, Trying
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.restoring import Restored, find
from gpucloud.resume.save.cadence import Windows
from gpucloud.resume.save.capture import Capture
from gpucloud.resume.save.deciding import Moment, Pauses, SaveDecider
from gpucloud.resume.save.saving import Saver
from gpucloud.resume.save.writer import Writer
from gpucloud.resume.settings import Settings, read_settings, surroundings, tuned
from gpucloud.resume.sources import source_of
from gpucloud.resume.state import randomness
from gpucloud.resume.state.modules import rebuckets
from gpucloud.resume.state.randomness import Draws
from gpucloud.resume.state.stages import module_of, share_of
from gpucloud.resume.state.state import TrainingState
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

_newest: dict[int, weakref.ref[Run]] = {}
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
    load_state_dict(), and generators of the script's own. Each may be a list, a tuple or a dict of such. `seed`, the
    same on all ranks, orders the data of `run.loader` and seeds every rank's random number generators with it, each
    otherwise. Raises UsageError when the checkpoint does not fit, StoreError when the store does not answer.
    """
    settings = read_settings()
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **others}
    parts = dict(one for name, part in given.items() for one in _each(name, part))
    state = TrainingState(parts)
    anew = any(rebuckets(part) for part in map(module_of, parts.values()) if isinstance(part, torch.nn.Module))
    return Run(settings, state, total_steps=total_steps, seed=seed, rebuckets=anew)


def _each(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what has a state, of lists, tuples and dicts each of what they hold, as `optimizer.0`."""
    if isinstance(part, (list, tuple, dict)) and part and not hasattr(part, "state_dict"):
        for key, one in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _each(f"{name}.{key}", one)
    elif part is not None:
        yield name, part


_NO_GRADIENT = (
    "its optimizer steps with gradients that were there before the last `run.step()`, which no checkpoint has"
)


class Run:
    """One attempt's part of a job, on this rank. Steps count from 1.

    `values` are the script's own, as its model's configuration: what JSON has, saved with each checkpoint (rank 0's
    hold), there again after a resume, and told by `resume.peek` before that.
    """

    _is_at_first_step = True  # by then the script has made all that it will

    def __init__(
        self, settings: Settings, state: TrainingState, *, total_steps: int | None, seed: int, rebuckets: bool
    ) -> None:
        self._settings = settings
        self._state = state
        self._seed = seed
        self._folder = AttemptFolder(settings.folder, Signals() if settings.folder is None else None)
        self._ranks = Ranks()
        self._surroundings = surroundings(self._ranks.world, state.arrangement)
        self._exactness = Exactness(says=self._ranks.rank == 0)
        draws = Draws(seed, self._ranks.rank)
        self._continued = Continued(settings, state, self._ranks, self._surroundings, self._exactness, draws)
        self._checkpoints = Checkpoints(open_store(settings.store), settings.prefix, keep=settings.keep)
        self._trying = Trying(settings.trial)
        capture = Capture(state, self._ranks)
        writer = Writer(settings.store, settings.prefix, settings.keep, capture.save_buffer.descriptor)
        if self._ranks.rank == 0:
            self._checkpoints.announce(settings.attempt)
        with randomness.kept(), self._barred():  # what the script draws next is the same whether it resumes or not
            restored = find(self._checkpoints, self._ranks, state)
            if restored:
                require_steps_left(restored.commit.step, total_steps, settings)
                self._continued.begin(restored, self._trying, rebuckets=rebuckets)
        self.values: dict[str, Any] = dict(restored.manifest.notes.values) if restored else {}
        self._feed = Feed(state, self._ranks, self._continued, self._exactness, total_steps=total_steps)
        self._exactness.is_fresh = restored is None
        self._windows = Windows(
            state.optimizers, tuple(state.modules.values()), self._continued.own.get("longest_window", 0)
        )
        saver = Saver(self._checkpoints, writer, capture, self._ranks, committed=self.steps_done)
        self._decider = SaveDecider(settings.cadence, self._checkpoints, saver, self._ranks, self._folder)
        self._decider.of_a_trial = settings.trial is not None
        self._progress = Progress(self._folder if self._ranks.rank == 0 else AttemptFolder(None), self)
        self._decider.progress = self._progress
        self._pauses = Pauses(self._decider, self._ranks, self._folder)
        self._profiling = Profiling(self._folder, settings.profile_steps, self._ranks.rank)
        _newest[settings.attempt] = weakref.ref(self)
        self._folder.listen()
        if self._ranks.rank == 0:
            self._begin(restored)

    @property
    def rank(self) -> int:
        """This process among all that train, from 0."""
        return self._ranks.rank

    @property
    def steps_done(self) -> int:
        """The last step that is done, those of attempts before counted; 0 when there is none."""
        return self._feed.steps_done

    @property
    def total_steps(self) -> int | None:
        """How many steps the run has; by its epochs where nobody said, and None where their length is not known."""
        return self._feed.total_steps

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the loader's last batch; of that before the resume, where there is none yet."""
        return self._feed.epoch

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint that counts; 0 when there is none."""
        return self._decider.committed

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        num_workers: int = 0,
        shuffle: bool = True,
        over: Any = None,
        changed: bool = False,
        **options: Any,
    ) -> Loader:
        """Return the run's batches, from the next one on; `options` go to torch's DataLoader.

        `global_batch` is the number of samples in a step over all ranks: keep it, and the same samples make the
        same steps on any number of ranks. With tensor parallelism, and pipelines side by side, where some ranks train
        on the same samples, `over` is the dimension of the device mesh over which batches are split, as `mesh["data"]`;
        ranks that share their samples then draw the same random numbers. Within `run.epochs` a `for` ends with the
        epoch, else with the run's `total_steps`. Raises UsageError for a second loader, where ranks disagree on the
        order of samples, and when it cannot be split: neither over these ranks nor, in a job on a range of nodes, over
        any number of them that it may come to. The first step raises it where nothing says when the run ends. Seed,
        length or shuffle that are others than before a resume raise it too, unless they are meant to be `changed`: such
        a resume is best effort.
        """
        self._require_no_loader()
        for name, instead in _OURS.items():
            if name in options:
                raise UsageError(f"run.loader({name}=…): the run itself makes that", hint=instead)
        ranks = share_of(self._state.stages, over, (self.rank, self._ranks.world))
        if over is None and not self._state.stages:
            require_split(global_batch, self._settings.worlds)
        self._feed.draws.rank = ranks[0]
        loader = Loader(
            dataset,
            global_batch=global_batch,
            ranks=ranks,
            seed=self._seed,
            shuffle=shuffle,
            options={"num_workers": num_workers, **options},
        )
        loader.by_epoch = self._feed.by_epoch
        self._take_from(loader, dataset, in_workers=num_workers > 0, changed=changed)
        return loader

    def wrap(self, loader: Any, *, over: Any = None, changed: bool = False) -> Wrapped:
        """Return the batches of a loader of your own, from the one after the last step on; `for` ends with the epoch.

        Torch's DataLoader with any sampler continues exactly, and so does what has `state_dict()` or can be read again,
        as far as `docs/scripts-and-checkpoints` tells; what makes it less is said. A function that returns an iterable
        will do as well. Your own seeds count; batches of a map-style set draw random numbers by the run's seed, the
        epoch and their place in it. With tensor parallelism, and pipelines side by side, `over` is the dimension of the
        device mesh over which your loader splits its batches. Raises UsageError for a second loader, and where ranks'
        loaders do not go together; and where seed, sampler, batch size or length are others than before a resume,
        unless they are meant to be `changed`. Another number of ranks or workers never raises it.
        """
        self._require_no_loader()
        draws = self._feed.draws
        draws.rank, world = share_of(self._state.stages, over, (self.rank, self._ranks.world))
        draws.seeds = False
        source = source_of(loader, self._seed, draws.rank)
        alike = drawn_alike(self._state.stages, loader)
        wrapped = Wrapped(source, self._ranks.world, self._exactness.best_effort, self._say, alike)
        if (own := self._continued.own) and own["surroundings"]["world"] != self._ranks.world:
            self._exactness.best_effort("on another number of ranks your own loader hands out other batches")
        if over is None and world > 1 and (whole := takes_all(loader)):
            self._say(f"{whole} has every rank draw from the whole data set: torch's DistributedSampler splits it")
        self._take_from(
            wrapped,
            getattr(loader, "dataset", None),
            in_workers=bool(getattr(loader, "num_workers", 0)),
            changed=changed,
            wrong=other_share(loader, draws.rank, world),
        )
        if not source.can_wait:
            wrapped.wait = contextlib.nullcontext()
        self._exactness.best_effort(source.lacks)
        return wrapped

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`; inside, a `for` over the run's loader ends with the epoch.

        A run that was interrupted in an epoch begins with it, and its `for` has what is left of it: nothing, where the
        last step was its last, so that what follows the `for` is done.
        """
        return self._feed.epochs(count)

    def _require_no_loader(self) -> None:
        self._pauses.over()
        if self._feed.loader is not None:
            raise UsageError("a run has one loader", hint="use torch's DataLoader for evaluation data")

    def _take_from(self, loader: Batches, dataset: Any, **more: Any) -> None:
        """Have this be what the run's batches come from."""
        self._feed.take_from(loader, dataset, self._progress, **more)
        loader.wait = self._pauses.stalls(self._at_rest)

    def step(self, *, loss: Any = None) -> None:
        """Say that a step is done; `loss` (number or tensor) is for reports.

        Saves when it is due, or when the agent of any node wishes it: copies the state, and the rest goes on beside the
        training. When an agent asks to stop, all ranks save this step, wait until it counts and leave: SystemExit(75).
        No rank waits for another at a step of less than a tenth of a second: what a node wishes then, or the clock, is
        done by all at the end of the next, and of those that take less than 25 ms within the next six after 50 ms.
        All that belongs to the step comes before it, `scheduler.step()` too: a checkpoint has what was until here. What
        is drawn between it and the next batch, as an evaluation does, changes no number that training draws.
        Where gradients are gathered over several steps, saving and leaving wait for the optimizer's next step. With DDP
        over three or more ranks (on GPUs: two), the first step or steps after a resume are taken back and their batches
        handed out again.
        Raises Fenced when another attempt has taken over, UsageError when `init` was called once more meanwhile.
        """
        self._require_newest()
        self._pauses.over()
        self._feed.ahead_of_step()
        if self._is_at_first_step:
            self._is_at_first_step = False
            self._state.require_stages_known()
        window = self._windows.now()
        if self._continued.in_vain(window, self._feed.loader):
            return
        self._feed.stepped()
        if self._windows.found_nothing:
            self._exactness.best_effort(_NO_GRADIENT)
        self._progress.stepped(loss)
        self._trying.stepped(loss)
        if not self._profiling.over:
            with self._progress.phase("profile"):
                self._profiling.stepped()
        if self._decider.keep(self.steps_done, self._moment, window):
            self._leaving.leave(self.steps_done)
        if self._settings.trial is not None:
            self._leaving.try_(self._settings.trial, self.steps_done, self._progress, is_fresh=self._exactness.is_fresh)

    def rehearse(self, passes: Callable[[], object]) -> None:
        """Have DDP group its gradients by doing the passes of a step, so that no step after a resume is taken back.

        For a loop that cannot take one back: on every rank, once, ahead of the first step, with the batches that were
        handed out for it. `passes` are forward and backward, without the optimizer's step. Nothing is done where there
        is nothing to group; else the state is put back afterwards, and generators are as they were.
        """
        self._continued.rehearse(passes)

    def save(self, *, best: float | None = None) -> None:
        """Save now what the last step left, beside the training as ever; waits only for a save that is under way.

        Every rank calls it. With `best`, a metric of which more is better (give a loss with a minus; rank 0's holds),
        it is saved only if that is the best so far, and kept until there is a better one, beside the newest. In the
        midst of a step, or of gathered gradients, what is saved is what the optimizer's next step leaves. Raises what
        `step` does, and UsageError where not every rank calls it.
        """
        self._require_newest()
        self._pauses.over()
        if self._feed.is_in_a_step or not self._windows.is_closed:
            self._decider.ask(best)
        elif self._decider.save(self.steps_done, self._moment, best):
            self._leaving.leave(self.steps_done)

    def export(self, path: str | Path, *, of: str = "model", config: Any = None) -> None:
        """Write a module's weights as they are now for other programs, under the names of its `state_dict`.

        To `….pt`, `.pth` or `.bin` as `torch.load` reads them, else into a folder as `from_pretrained` does: `config`
        (a dict, or what has `to_dict`; if left out the module's own, or `run.values["config"]`) beside a safetensors
        file. Every rank calls it, rank 0 writes, and what ranks hold together is gathered tensor by tensor. Raises
        UsageError for a name or type that is none, StoreError where the file cannot be written.
        """
        module = self._state.modules.get(of)
        if of in self._state.stages:
            raise UsageError(
                f"{of!r} is a stage of a pipeline, and no rank has the whole model",
                hint="torch.save(stage_module.state_dict(), f'stage-{rank}.pt') on every rank",
            )
        if module is None:
            known = ", ".join(self._state.modules)
            raise UsageError(f"the run has no module {of!r}", hint=f"run.export(path, of=…): one of {known}")
        told = config if config is not None else getattr(module, "config", None) or self.values.get("config")
        export(module, Path(path), self._ranks, told)

    def _require_newest(self) -> None:
        if _newest[self._settings.attempt]() is not self:
            raise UsageError(
                "resume.init was called again in this process, and only the newest run can save",
                hint="call it once, with all that has a state: resume.init(model=…, other=…)",
            )

    @property
    def level(self) -> Level:
        """What a resume from what is saved now can promise, as far as is known."""
        return self._exactness.promise.level

    def best_effort(self, why: str) -> None:
        """Say that a resume is less than exact, for a reason that only the script knows."""
        self._exactness.best_effort(why)

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
        if self._feed.is_in_a_step or not self._windows.rests or _newest[self._settings.attempt]() is not self:
            return None
        return self.steps_done, self._moment

    def done(self) -> None:
        """Commit the final state, then say that the job is done: nothing else counts as success. Raises StoreError."""
        self._pauses.over()
        if self._feed.did_nothing and self._ranks.rank == 0:
            warn_of_nothing_left(self.steps_done, self._settings)
        self._leaving.done(self.steps_done, self._progress)

    @property
    def _leaving(self) -> Leaving:
        return Leaving(self._folder, self._ranks, self._decider, self._profiling, self._moment)

    def _begin(self, restored: Restored | None) -> None:
        base = restored.commit if restored else None
        if not self._checkpoints.begin(base=base, attempt=self._settings.attempt):
            say("this store ignores conditional writes: two attempts at once would not notice each other")
        if restored:
            best = self._checkpoints.best()
            self._decider.best = best[1] if best else self._decider.best
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

    def _told_values(self) -> dict[str, Any]:
        """Return the script's own values as they are now. UsageError for what JSON does not have, or too much of it."""
        try:
            text = json.dumps(self.values)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"run.values cannot be saved: {error}", hint="numbers, texts, lists and dicts; all else goes to init"
            ) from error
        if len(text) > MOST_VALUES:
            raise UsageError(
                f"run.values has {format_size(len(text))}, of {format_size(MOST_VALUES)} that it may have",
                hint="give init what is large: anything with state_dict() and load_state_dict()",
            )
        told: dict[str, Any] = json.loads(text)
        return told

    def _moment(self) -> Moment:
        lacks = self._windows.lacks
        promise = self._exactness.promise.weaker(self._feed.promise())
        promise = promise.weaker(tuned()) if lacks is None else Promise(Level.BEST_EFFORT, lacks)
        return Moment(
            step=self.steps_done,
            promise=promise,
            lacks=lacks,
            steps_are_seen=self._windows.seen,
            notes=Notes(epoch=self._feed.epoch if self._feed.loader is not None else None, values=self._told_values()),
            own={
                "longest_window": self._windows.longest,
                **self._feed.state(),
                "surroundings": self._surroundings,
                "given": self._continued.given,
                "changed": self._state.changed(),
                **self._trying.state(),
            },
        )
