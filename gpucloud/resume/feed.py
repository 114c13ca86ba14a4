"""Where a run stands in its data: which steps and epochs are done, and what holds ahead of each batch and step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from gpucloud.domain.checkpoint.manifest import Level, Promise
from gpucloud.domain.errors import UsageError
from gpucloud.resume.attempt import Continued, Exactness
from gpucloud.resume.batches import Batches
from gpucloud.resume.folder import Progress
from gpucloud.resume.loader import samplers_in
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.save.cadence import Schedules
from gpucloud.resume.state.randomness import Draws
from gpucloud.resume.state.stages import Places
from gpucloud.resume.state.state import TrainingState

_NO_LOADER = Promise(
    Level.BEST_EFFORT, "without `run.loader` or `run.wrap`, which samples come next is up to the script"
)
_LATE_SCHEDULE = "a schedule's step comes after `run.step()`, so that no checkpoint has it: call it before"
_AHEAD = "batches are taken before the step ahead of them ends, as a prefetcher does, and a resume leaves those out"
_BETWEEN = "it was saved after a schedule's step at the end of an epoch, which is done once more: evaluate before it"


class Feed:
    """What a run's batches come from, and how far it came; `total_steps` is what the script said, `loader` is its own.

    Generators stand ahead of each batch where the last step left them: what is drawn between, as in an evaluation,
    changes nothing of what is trained on.
    """

    loader: Batches | None = None
    _epoch: int | None = None  # of `epochs`
    _epochs: int | None = None
    _schedules: Schedules  # from the loader on

    def __init__(
        self, state: TrainingState, ranks: Ranks, continued: Continued, exactness: Exactness, *, total_steps: int | None
    ) -> None:
        self._state = state
        self._ranks = ranks
        self._continued = continued
        self._exactness = exactness
        self._total_steps = total_steps
        self.draws: Draws = continued.draws
        self.steps_done = self._first_step = continued.step

    @property
    def total_steps(self) -> int | None:
        """How many steps the run has; by its epochs where nobody said, and None where their length is not known."""
        loader = self.loader
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
        if self.loader is not None:
            return self.loader.epoch
        place: dict[str, int] = self._continued.own.get("loader") or {"epoch": 0, "used": 0}
        return max(place["epoch"] - (not place["used"]), 0)

    @property
    def by_epoch(self) -> bool:
        """Whether this is inside `epochs`."""
        return self._epoch is not None

    @property
    def is_over(self) -> bool:
        """Whether as many steps are done as the script said."""
        return self._total_steps is not None and self.steps_done >= self._total_steps

    @property
    def did_nothing(self) -> bool:
        """Whether this goes on from a checkpoint, and no step was made since."""
        return self._first_step > 0 and self.steps_done == self._first_step

    @property
    def nothing_is_handed_out(self) -> bool:
        """Whether the next batch is the first of those that the next step takes."""
        return self.loader is not None and not self.loader.untrained

    @property
    def is_in_a_step(self) -> bool:
        """Whether batches are handed out that no step was made of yet."""
        return self.loader is not None and bool(self.loader.untrained)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`."""
        place = self._continued.own.get("loader") or {"epoch": 0}
        self._epochs = count
        for epoch in range(place["epoch"] if self.loader is None else self.loader.handed.epoch, count):
            if self.is_over:
                return
            self._epoch = epoch
            if self.loader is not None:
                self.loader.by_epoch = True
                self.loader.enter(epoch)
            yield epoch

    def take_from(
        self, loader: Batches, dataset: Any, progress: Progress, *, in_workers: bool, changed: bool, wrong: str = ""
    ) -> None:
        """Have this be what the run's batches come from.

        UsageError where ranks disagree, where this rank's part is `wrong`, and where it is other data than before but
        for what is meant to be `changed`.
        """
        self._require_one_order(loader, wrong)
        self._exactness.best_effort(self._state.own_generator(dataset, in_workers=in_workers) or "")
        if position := self._continued.own.get("loader"):
            others = loader.load_state_dict(position)
            if not changed:
                self._require_as_before({name: how for name, how in others.items() if name in loader.firm})
            self._exactness.best_effort(", ".join(f"{name} {how}" for name, how in others.items()))
        self._schedules = Schedules(self._state.others)
        self._progress = progress
        loader.begin = self._begin_batches
        loader.asked = self._go_on_as_the_step_left
        loader.opened = progress.batch_wanted
        loader.over = self._epoch_is_over
        loader.waited = progress.waited
        loader.ended = lambda: self.is_over
        self.loader = loader

    def ahead_of_step(self) -> None:
        """See to what must hold at the end of a step. UsageError where nothing says how many the run has."""
        if self.loader is None:
            self._go_on_without_loader()
        elif self._total_steps is None and self._epochs is None and not self.loader.ends_elsewhere:
            raise UsageError(
                "batches come without end, and nothing says how many steps the run has",
                hint="for epoch in run.epochs(10): around it, or resume.init(total_steps=…)",
            )

    def stepped(self) -> None:
        """A step is done that counts."""
        self.steps_done += 1
        self._continued.begun()
        if self.loader is not None:
            self.loader.stepped()
            self._schedules.stepped()
            self.draws.stepped()
            if self.loader.ahead:
                self._exactness.best_effort(_AHEAD)

    def promise(self) -> Promise:
        """Return what a resume from after the last step can promise, as far as data and schedules go."""
        if self.loader is None:
            return _NO_LOADER
        if self.loader.trained.over and self._schedules.moved:
            return Promise(Level.BEST_EFFORT, _BETWEEN)
        return Promise()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        position = self.loader.state_dict() if self.loader is not None else None
        return {"randomness": self.draws.state(), "loader": position}

    def _require_as_before(self, others: dict[str, str]) -> None:
        """Nobody is to find out from a loss that it was trained on other data: on all ranks alike."""
        for rank, text in enumerate(self._ranks.gathered(json.dumps(others).encode())):
            found = ", ".join(f"{name} {how}" for name, how in json.loads(text).items())
            if found:
                where = f" on rank {rank}" if self._ranks.world > 1 else ""
                raise UsageError(
                    f"the data are others than at step {self._first_step}{where}: {found}",
                    hint="make them as they were, or say that it is meant: changed=True for run.loader or run.wrap",
                )

    def _require_one_order(self, loader: Batches, wrong: str) -> None:
        """Ranks that order the samples each in its own way would train on some twice, and on others never."""
        rules = {**loader.rules, "total_steps": self._total_steps, **({"wrong": wrong} if wrong else {})}
        told = [json.loads(one) for one in self._ranks.gathered(json.dumps(rules).encode())]
        for rank, theirs in enumerate(told):
            if "wrong" in theirs:
                raise UsageError(
                    f"on rank {rank}, {theirs['wrong']}",
                    hint="DistributedSampler(dataset) asks the process group; where ranks share their samples, "
                    'run.wrap(loader, over=mesh["data"])',
                )
            for name in {**told[0], **theirs}:
                ours, there = told[0].get(name), theirs.get(name)
                if ours != there:
                    raise UsageError(
                        f"the ranks differ in {name}: {ours} on rank 0, {there} on rank {rank}",
                        hint=loader.same_seed if name == "seed" else f"give every rank the same {name}",
                    )

    def _begin_batches(self) -> None:
        # Whatever the script drew since `init`, the first batch finds the generators as the last step left them; and so
        # it does again after batches that the script only looked at.
        if self.steps_done == self._first_step and self.nothing_is_handed_out:
            self._continued.see_changes()
        self.draws.begin(self.steps_done)
        self._progress.batch_wanted()

    def _go_on_as_the_step_left(self, first_of_epoch: bool) -> None:  # noqa: FBT001
        """Have the next batch find the generators as the last step left them: a resumed run does not draw again what
        was drawn since, as an evaluation does.
        """
        if not self.nothing_is_handed_out:
            return
        if not (first_of_epoch and self.loader is not None and self.loader.by_epoch) and self._schedules.late():
            self._exactness.best_effort(_LATE_SCHEDULE)
        self.draws.go_on()

    def _epoch_is_over(self) -> None:
        if self.loader is not None and (steps := self._continued.epoch_is_over()):
            self.steps_done += steps
            self.loader.stepped()
            self.draws.stepped()

    def _go_on_without_loader(self) -> None:
        """No number is drawn again that steps before the resume drew, but for those of the first step."""
        if self.draws.are_saved:
            self._exactness.lower(_NO_LOADER)
            self.draws.begin(self.steps_done)


def other_share(loader: Any, rank: int, world: int) -> str:
    """Return in words how the loader's sampler is not that of this rank; empty where it is, or knows of no ranks."""
    keys = getattr(loader, "batch_sampler", None)
    sampler = getattr(keys, "sampler", None) or getattr(loader, "sampler", None)
    own, all_ = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if not isinstance(own, int) or not isinstance(all_, int) or (own, all_) == (rank, world):
        return ""
    return f"the sampler takes share {own} of {all_}, and this is {rank} of {world}"


def takes_all(loader: Any) -> str | None:
    """Return the sampler's name where every rank has one that knows of no other."""
    keys = getattr(loader, "batch_sampler", None)
    if keys is not None and type(keys) is not BatchSampler:
        return None  # how it shares batches out is its own affair; torch gives such a loader a sampler that nobody asks
    sampler = getattr(loader, "sampler", None)
    return type(sampler).__name__ if type(sampler) in (RandomSampler, SequentialSampler) else None


def drawn_alike(stages: Places, loader: Any) -> Mapping[str, Any]:
    """Return what all ranks must have alike so that those of a pipeline read the same batches of a loader of their own.

    UsageError for a sampler that draws from torch's own generator: by then each stage has drawn otherwise from it.
    """
    drawing = [one for one in samplers_in(loader)[1:] if hasattr(one, "generator")]
    if not stages or not drawing:
        return {}
    sampler: Any = drawing[-1]
    if sampler.generator is None:
        raise UsageError(
            f"{type(sampler).__name__} draws from each rank's own generator, and ranks of a pipeline read one order",
            hint="DataLoader(…, generator=torch.Generator().manual_seed(0)) on every rank, or run.loader",
        )
    return {"seed of the sampler": sampler.generator.initial_seed()}
