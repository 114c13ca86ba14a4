"""The training data in one order for ever: the same global batches on any number of ranks, from any step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Batches, Position
from gpucloud.resume.state import randomness

Place = tuple[int, int]
"""Epoch and index: what a sample's randomness depends on, beside the seed."""

COLLATION = 1  # the samples of a batch and its collation draw other numbers


class Loader(Batches):
    """Batches without end, epoch after epoch; `for` ends when the run's `total_steps` are done.

    In `run.epochs` it ends with the epoch. Each rank gets its strided share of a global batch. Samples that do not fill
    the last batch of an epoch are left out of that epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        ranks: tuple[int, int],
        seed: int,
        shuffle: bool = True,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self._rank, self._world = ranks
        self._samples = _count(dataset)
        require_split(global_batch, (self._world,))
        _require_batch(global_batch, self._samples)
        self.global_batch = global_batch
        self.steps_per_epoch = self._samples // global_batch
        self._first = Position()
        self._seed = seed
        self._shuffle = shuffle
        self._generator = torch.Generator()  # its own, which keeps DataLoader from drawing from the script's
        self._torch_loader = DataLoader(
            Seeded(dataset, seed),
            batch_sampler=Rest(self._rest),
            generator=self._generator,
            **{**options, "collate_fn": Collated(options.get("collate_fn") or default_collate)},
        )
        self.one_iterator = bool(options.get("persistent_workers"))

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self.steps_per_epoch

    @property
    def length(self) -> int | None:
        """The same."""
        return self.steps_per_epoch

    @property
    def rules(self) -> dict[str, int]:
        """What decides which samples make which step: the same on all ranks and in all attempts of an exact run."""
        return {
            "seed": self._seed,
            "samples": self._samples,
            "shuffle": self._shuffle,
            "global_batch": self.global_batch,
        }

    def state_dict(self) -> dict[str, int]:
        """Return the position as epoch and samples of it used, which hold for another global batch too."""
        place = self.trained
        return {"epoch": place.epoch, "used": place.batch * self.global_batch, "over": place.over, **self.rules}

    def load_state_dict(self, state: dict[str, int]) -> tuple[str, ...]:
        """Continue from a position; return which rules were others there, each as `name before → now`."""
        batch = min(state["used"] // self.global_batch, self.steps_per_epoch)
        self._continue_from(Position(state["epoch"], batch, over=bool(state.get("over"))))
        return tuple(f"{name} {state[name]} → {now}" for name, now in self.rules.items() if state[name] != now)

    def _open(self, start: Position) -> Iterator[Any]:
        if start.batch >= self.steps_per_epoch:
            return iter(())
        self._first = start
        self._generator.manual_seed(randomness.mix(self._seed, start.epoch, self._rank) >> 1)
        return iter(self._torch_loader)

    def _rest(self) -> Iterator[list[Place]]:
        epoch, first = self._first.epoch, self._first.batch
        order = self._order(epoch)
        for batch in range(first, self.steps_per_epoch):
            start = batch * self.global_batch
            yield [(epoch, i) for i in order[start + self._rank : start + self.global_batch : self._world]]

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator().manual_seed(randomness.mix(self._seed, epoch) >> 1)
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return order


def require_split(global_batch: int, worlds: tuple[int, ...]) -> None:
    """Raise UsageError when the batch cannot be divided over some of these numbers of ranks."""
    undivided = next((world for world in worlds if global_batch < 1 or global_batch % world), None)
    if undivided is not None:
        raise UsageError(
            f"global_batch={global_batch} cannot be split over {undivided} ranks",
            hint=f"choose a multiple of {math.lcm(*worlds)}",
        )


class Seeded(Dataset[Any]):
    """A data set whose every sample draws from generators seeded by (seed, epoch, index).

    So an augmentation does not depend on worker, order or number of ranks. A data set that fetches whole batches
    (`__getitems__`) is seeded once a batch, by its first sample.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._together = getattr(dataset, "__getitems__", None) if fetches_batches(dataset) else None

    def __getitems__(self, places: list[Place]) -> Fetched:
        """Return the samples at these places; the generators are left as they were."""
        with randomness.kept():
            if self._together is not None:
                randomness.seed_sample(randomness.mix(self._seed, *places[0]))
                samples = self._together([index for _, index in places])
            else:
                samples = [self._sample(place) for place in places]
        return Fetched(samples, randomness.mix(self._seed, *places[0], COLLATION))

    def _sample(self, place: Place) -> Any:
        randomness.seed_sample(randomness.mix(self._seed, *place))
        return self._dataset[place[1]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Samples of one rank's part of a batch, and what seeds their collation."""

    samples: Any
    seed: int


class Collated:
    """A `collate_fn` that draws from generators seeded by (seed, epoch, the first sample's index).

    A mask that it draws depends on no worker and no start, and is another on each rank. On another number of ranks it
    is another too: the ranks' parts of a batch are.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: Fetched) -> Any:
        """Return the batch; the generators are left as they were."""
        with randomness.kept():
            randomness.seed_sample(fetched.seed)
            return self._collate(fetched.samples)


def fetches_batches(dataset: Any) -> bool:
    """Whether the data set itself fetches whole batches: torch's `Subset` does for one that does not, too."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class Rest:
    """A batch sampler that begins each iteration where the loader stands."""

    def __init__(self, rest: Callable[[], Iterator[Any]]) -> None:
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        return self._rest()


def _count(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a {type(dataset).__name__} cannot be continued at an exact sample",
            hint="give `loader` a data set with __len__ and __getitem__",
        )
    return len(dataset)


def _require_batch(global_batch: int, samples: int) -> None:
    if samples < global_batch:
        raise UsageError(
            f"the data set has {samples} samples, fewer than global_batch={global_batch}",
            hint="choose a smaller global_batch",
        )
