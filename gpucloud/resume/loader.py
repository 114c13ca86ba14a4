"""Map-style data in an order that can be gone through again: the run's own, the same global batches on any number of
ranks, or that of a sampler of the script's.
"""

from __future__ import annotations

import itertools
import math
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Batches, Position, Summed, changed, length_of
from gpucloud.resume.state import randomness

Place = tuple[int, int]
"""Epoch and index: what a sample's randomness depends on, beside the seed."""

COLLATION = 1  # the samples of a batch and its collation draw other numbers

NONE = object()
"""What comes when nothing comes."""


class Loader(Batches):
    """Batches without end, epoch after epoch; `for` ends when the run's `total_steps` are done.

    In `run.epochs` it ends with the epoch. Each rank gets its strided share of a global batch. Samples that do not fill
    the last batch of an epoch are left out of that epoch.
    """

    same_seed = "resume.init(seed=…): the same on all ranks, each then draws its own random numbers"
    firm = ("seed", "samples", "shuffle")

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

    def load_state_dict(self, state: dict[str, int]) -> dict[str, str]:
        """Continue from a position; return which rules were others there, by their names as `before → now`."""
        if "rules" in state:
            raise UsageError(
                "the run's batches came from a loader of the script's own before",
                hint="give run.wrap what it had, or the job file another `name:` to begin at step 0",
            )
        batch = min(state["used"] // self.global_batch, self.steps_per_epoch)
        self._continue_from(Position(state["epoch"], batch, over=bool(state.get("over"))))
        return changed(state, self.rules)

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
        of_epoch = randomness.mix(self._seed, places[0][0])
        with randomness.kept() as generators:
            if self._together is not None:
                generators.seed(randomness.mix(places[0][1], mixed=of_epoch))
                samples = self._together([index for _, index in places])
            else:
                samples = []
                for _, index in places:
                    generators.seed(randomness.mix(index, mixed=of_epoch))
                    samples.append(self._dataset[index])
        return Fetched(samples, randomness.mix(places[0][1], COLLATION, mixed=of_epoch))


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
        self._draws = collate is not default_collate

    def __call__(self, fetched: Fetched) -> Any:
        """Return the batch; the generators are left as they were."""
        if not self._draws:
            return self._collate(fetched.samples)
        with randomness.kept() as generators:
            generators.seed(fetched.seed)
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


# A DataLoader over a map-style set: the sampler is gone through again, and nothing of what was trained on is fetched.


_WATCHED = 4  # draws of a sampler, at the begin of each epoch of an attempt


class Order:
    """What a sampler or batch sampler says, fetched so that a sample's random numbers depend on no worker."""

    lacks = ""
    kind = "from a sampler"
    can_wait = True

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int) -> None:
        self.loader = loader
        together = loader.batch_sampler is not None
        self._keys: Any = loader.batch_sampler if together else loader.sampler
        self._own = randomness.generators_of(self._keys)
        self._seed, self._rank = seed, rank
        self._rest: Iterator[Any] = iter(())
        self._sums: deque[int] = deque()
        self._generator = torch.Generator()
        if not getattr(loader, "in_order", True):
            self.lacks = "in_order=False hands out what is ready first, which is another batch each time"
        collate: Any = loader.collate_fn if together else Alone(loader.collate_fn)
        self._torch_loader = DataLoader(
            Drawn(loader.dataset, seed, together=together),
            batch_sampler=Rest(lambda: self._rest),
            generator=self._generator,
            collate_fn=Collated(collate),  # type: ignore[arg-type]  # what comes from `Drawn` is no list
            **{name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)},
        )

    @property
    def rules(self) -> Mapping[str, Any]:
        """How the sampler draws, as far as its attributes tell, and from how many samples."""
        sampler = self._samplers()[-1]
        told = {name: getattr(sampler, name, None) for name in ("seed", "shuffle")}
        if told["seed"] is None:
            told["seed"] = getattr(sampler, "initial_seed", None)  # as Accelerate's has it
        return {
            "sampler": type(sampler).__name__,
            "batch_size": getattr(self._keys, "batch_size", None),
            "samples": length_of(self.loader.dataset),
            **{name: value for name, value in told.items() if isinstance(value, (bool, int))},
        }

    def first(self) -> dict[str, Any]:
        """Return the states of the sampler, as far as it has one, and of its own generators."""
        states = [one.state_dict() if has_state(one) else None for one in self._samplers()]
        return {"own": randomness.states_of(self._own), "samplers": states}

    def put(self, first: Mapping[str, Any]) -> None:
        """Have them so again."""
        for one, state in zip(self._samplers(), first["samplers"], strict=False):
            if state is not None and has_state(one):
                one.load_state_dict(state)
        randomness.put_states(self._own, first["own"])

    def open(self, epoch: int, used: int, first: Mapping[str, Any]) -> tuple[Iterator[Summed], int]:  # noqa: ARG002
        """Go through the sampler from the epoch's begin."""
        set_epoch(epoch, *self._samplers(), self.loader.dataset)
        last, keys = 0, iter(self._keys)
        for one in itertools.islice(keys, used):
            last = sum_of_keys(one, last)
        if (following := next(keys, NONE)) is NONE:  # asked for now: here samplers draw what the epoch's order is
            return iter(()), last
        self._sums.clear()
        self._rest = self._numbered(epoch, used, itertools.chain((following,), self._seen(keys)), last)
        self._generator.manual_seed(randomness.mix(self._seed, epoch, self._rank) >> 1)
        return ((batch, self._sums.popleft()) for batch in iter(self._torch_loader)), last

    def state(self) -> dict[str, Any]:
        """Return nothing: the position, and how the epoch began, are all there is."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""

    def _samplers(self) -> tuple[Any, ...]:
        return samplers_in(self._keys)

    def _numbered(self, epoch: int, first: int, keys: Iterable[Any], last: int) -> Iterator[tuple[int, int, Any]]:
        for number, one in enumerate(keys, first):
            last = sum_of_keys(one, last)
            self._sums.append(last)
            yield epoch, number, one

    def _seen(self, keys: Iterator[Any]) -> Iterator[Any]:
        """Yield the keys, and see whether random numbers are drawn for the first of them."""
        for _ in range(_WATCHED):
            before = randomness.here()
            one = next(keys, NONE)
            if not before.stands():
                self.lacks = (
                    f"{type(self._keys).__name__} draws random numbers in the midst of an epoch, as training does"
                )
            if one is NONE:
                return
            yield one
        yield from keys


def samplers_in(keys: Any) -> tuple[Any, ...]:
    """Return a sampler and those in it, the innermost last: batches of samples may be shared out among ranks."""
    inner = next((one for name in ("batch_sampler", "sampler") if (one := getattr(keys, name, None)) is not None), None)
    return (keys,) if inner is None or inner is keys else (keys, *samplers_in(inner))


_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
"""Options of torch's DataLoader that do not say which samples come when."""


class Drawn(Dataset[Any]):
    """A data set whose batches draw from generators seeded by (seed, epoch, number of the batch, its first key).

    A sampler may draw a sample twice in an epoch: it is augmented otherwise each time. To seed every sample would hold
    for no resume more: on another number of ranks, which alone divides batches otherwise, a sampler says other ones.
    """

    def __init__(self, dataset: Any, seed: int, *, together: bool) -> None:
        self._dataset, self._seed, self._together = dataset, seed, together
        self._fetches = together and fetches_batches(dataset)

    def __getitems__(self, batch: tuple[int, int, Any]) -> Fetched:
        """Return the samples of a batch; the generators are left as they were."""
        epoch, number, keys = batch
        keys = list(keys) if self._together else [keys]
        of_batch = randomness.mix(self._seed, epoch, number, _number_of(keys[0]) if keys else 0)
        with randomness.kept() as generators:
            generators.seed(of_batch)
            samples = self._dataset.__getitems__(keys) if self._fetches else [self._dataset[key] for key in keys]
        return Fetched(samples, randomness.mix(COLLATION, mixed=of_batch))


class Alone:
    """The `collate_fn` of a loader whose data set makes the batches."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the only one, converted."""
        return self._collate(samples[0])


def sum_of_keys(keys: Any, before: int = 0) -> int:
    """Return a sum of a batch's keys, and of those before it."""
    try:
        data = array("q", keys).tobytes()
    except (TypeError, OverflowError):
        data = repr(keys).encode()
    return zlib.crc32(data, before)


def _number_of(key: Any) -> int:
    return key if type(key) is int else zlib.crc32(repr(key).encode())


def set_epoch(epoch: int, *things: Any) -> None:
    """Tell the epoch to those that want to know it."""
    for one in things:
        tell = getattr(one, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def has_state(thing: Any) -> bool:
    """Whether it tells where it stands, and can be put back there."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
