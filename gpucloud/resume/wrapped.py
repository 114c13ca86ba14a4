"""A loader of the script's own, continued at its next batch: exactly where its source allows it, and told where not."""

from __future__ import annotations

import itertools
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Batches, Position
from gpucloud.resume.loader import COLLATION, Collated, Fetched, Rest, fetches_batches
from gpucloud.resume.state import randomness

Summed = tuple[Any, int]
"""A batch, and a sum by which it, or all until it, can be told from others."""

_NONE = object()
_LOOKED_AT = 64  # values of a tensor
_WATCHED = 4  # draws of a sampler, at the begin of each epoch of an attempt


class Source(Protocol):
    """Where a wrapped loader's batches come from. `lacks` says why a resume may be less than exact, "" if nothing."""

    loader: Any
    lacks: str
    can_wait: bool  # another thread may ask for its state while the script waits for a batch

    @property
    def rules(self) -> Mapping[str, Any]:
        """What must be the same for the same batches to come again."""
        ...

    def first(self) -> dict[str, Any]:
        """Return what an epoch that begins now depends on, beside the global generators."""
        ...

    def put(self, first: Mapping[str, Any]) -> None:
        """Have the next epoch begin so."""
        ...

    def open(self, epoch: int, used: int, first: Mapping[str, Any]) -> tuple[Iterator[Summed], int]:
        """Begin an epoch for which all was put, and return the batches after those `used`, with the last one's sum.

        The global generators are as they were when the epoch began.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what of it a checkpoint must have beside that, after the last step."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back; what it says holds for the next `open`."""
        ...


class Wrapped(Batches):
    """The batches of a loader that the script made; a `for` ends with the epoch, as that loader's does.

    What the loader has is found here too, as `sampler` and `dataset`.
    """

    by_epoch = True

    def __init__(
        self, source: Source, world: int, lower: Callable[[str], None], tell: Callable[[str], None] = lambda _text: None
    ) -> None:
        super().__init__()
        self._source = source
        self._world, self._is_of_others = world, False
        self._tell, self._lower = tell, lower
        self._first: dict[str, Any] | None = None  # of the epoch that was opened last
        self._stream: Iterator[Summed] | None = None
        self._at = Position()  # the stream's next batch
        self._window: list[tuple[Any, int, Any]] = []  # handed out since the last step
        self._sum = self._trained_sum = 0

    def __len__(self) -> int:
        """The number of batches in an epoch. TypeError where nobody knows."""
        return len(self._source.loader)

    def __getattr__(self, name: str) -> Any:
        if "_source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._source.loader, name)

    @property
    def length(self) -> int | None:
        """How many batches an epoch has; None where nobody knows."""
        return length_of(self._source.loader)

    @property
    def rules(self) -> Mapping[str, Any]:
        """What decides which samples make which step: the same on all ranks and in all attempts of an exact run."""
        return {"batches": self.length, **self._source.rules}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, how its epoch began, and the source's own state."""
        place = self.trained
        if place.batch and not place.over and self._first is not None:
            first = self._first
        else:  # the next epoch begins as the generators are then
            begun = self._first if self._stream is not None and self._at.epoch == place.epoch else None
            first = {"generators": None, "source": begun["source"] if begun else self._source.first()}
        return {
            "epoch": place.epoch,
            "used": place.batch,
            "over": place.over,
            "first": first,
            "sum": self._trained_sum,
            "world": self._world,
            "source": self._source.state(),
            "rules": dict(self.rules),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Continue from a position; return which rules were others there, each as `name before → now`."""
        used = state["used"] * state["world"] // self._world  # each rank's share of what all were trained on
        self._is_of_others = state["world"] != self._world
        self._continue_from(Position(state["epoch"], used, over=state["over"]))
        self._first, self._trained_sum = state["first"], state["sum"]
        self._source.load(state["source"])
        if not state["used"] or state["over"]:
            self._source.put(state["first"]["source"])
        return changed(state["rules"], self.rules)

    def stepped(self) -> None:
        """Say that a step was made of all that was handed out."""
        super().stepped()
        self._window.clear()
        self._trained_sum = self._sum
        if self._source.lacks:
            self._lower(self._source.lacks)

    def go_back(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Hand out again what came since the last step."""
        self.handed, self.untrained, self._again = self.trained, 0, True

    def _open(self, start: Position) -> Iterator[Any]:
        window, self._window = self._window, []
        if self._stream is not None and self._at == Position(start.epoch, start.batch + len(window)):
            return itertools.chain(self._replayed(window), self._watched(self._stream))
        self._window = window if start != self.trained else []
        if start.batch:
            here = randomness.capture()
            self._stream = self._opened(start)
            randomness.put_back(here)
        else:  # what is drawn to begin an epoch is drawn once, and the next epoch is another
            self._first = {"generators": randomness.capture(), "source": self._source.first()}
            self._stream, _ = self._source.open(start.epoch, 0, self._first["source"])
        self._at = start
        return self._watched(self._stream)

    def _opened(self, start: Position) -> Iterator[Summed]:
        """Begin the epoch as it was begun, and go on after what was trained on."""
        first = self._first
        assert first is not None  # noqa: S101  an epoch that is gone on with was begun, here or before
        randomness.put_back(first["generators"])
        began = time.monotonic()
        self._source.put(first["source"])
        stream, last = self._source.open(start.epoch, start.batch, first["source"])
        if last != self._trained_sum and not self._is_of_others:
            self._lower("the data came in another order than before, or is other data: what comes next is another, too")
        if (took := time.monotonic() - began) > 1:
            self._tell(f"{start.batch} batches of epoch {start.epoch} were passed over, in {took:.0f} s")
        return stream

    def _watched(self, stream: Iterator[Summed]) -> Iterator[Any]:
        for batch, self._sum in stream:
            after = None if self._at.batch else randomness.capture()
            self._at = Position(self._at.epoch, self._at.batch + 1)
            self._window.append((batch, self._sum, after))
            yield batch
        self._stream = None

    def _close(self) -> None:
        self._stream = None
        self._window.clear()

    def _replayed(self, window: list[tuple[Any, int, Any]]) -> Iterator[Any]:
        for batch, self._sum, after in window:
            if after is not None:
                randomness.put_back(after)
            self._window.append((batch, self._sum, after))
            yield batch


def length_of(thing: Any) -> int | None:
    """Return its length, None where it has none."""
    try:
        return len(thing)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which rules were others, each as `name before → now`."""
    return tuple(f"{name} {before.get(name)} → {value}" for name, value in now.items() if before.get(name) != value)


def source_of(loader: Any, seed: int, rank: int) -> Source:
    """Return the source that the loader is. UsageError for what hands out no batches.

    `seed` is what samples' random numbers depend on.
    """
    if _is_torchs(loader):
        has_state = hasattr(loader.dataset, "state_dict")
        if not isinstance(loader.dataset, IterableDataset) and not has_state:
            return Order(loader, seed, rank)
        return Own(loader) if has_state and hasattr(loader, "load_state_dict") else Reread(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and hasattr(loader, "__iter__"):
        return Own(loader)
    if not hasattr(loader, "__iter__") and not callable(loader):
        raise UsageError(
            f"run.wrap takes what batches come from, not a {type(loader).__name__}",
            hint="give it a DataLoader, anything else that a `for` takes, or a function that returns such a thing",
        )
    return Reread(loader)


def _is_torchs(loader: Any) -> bool:
    """Whether what it hands out is what its sampler, its data set and its collation say, and nothing else."""
    makes = getattr(type(loader).__iter__, "__module__", "") if hasattr(loader, "__iter__") else ""
    return isinstance(loader, DataLoader) and makes.partition(".")[0] in ("torch", "torchdata")


# A DataLoader over a map-style set: the sampler is gone through again, and nothing of what was trained on is fetched.


class Order:
    """What a sampler or batch sampler says, fetched so that a sample's random numbers depend on no worker."""

    lacks = ""
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
        sampler = getattr(self._keys, "sampler", self._keys)
        told = {name: getattr(sampler, name, None) for name in ("seed", "shuffle")}
        return {
            "sampler": type(sampler).__name__,
            "batch_size": getattr(self._keys, "batch_size", None),
            "samples": length_of(self.loader.dataset),
            **{name: value for name, value in told.items() if isinstance(value, (bool, int))},
        }

    def first(self) -> dict[str, Any]:
        """Return the states of the sampler, as far as it has one, and of its own generators."""
        states = [one.state_dict() if _has_state(one) else None for one in self._samplers()]
        return {"own": randomness.states_of(self._own), "samplers": states}

    def put(self, first: Mapping[str, Any]) -> None:
        """Have them so again."""
        for one, state in zip(self._samplers(), first["samplers"], strict=False):
            if state is not None and _has_state(one):
                one.load_state_dict(state)
        randomness.put_states(self._own, first["own"])

    def open(self, epoch: int, used: int, first: Mapping[str, Any]) -> tuple[Iterator[Summed], int]:  # noqa: ARG002
        """Go through the sampler from the epoch's begin."""
        set_epoch(epoch, *self._samplers(), self.loader.dataset)
        last, keys = 0, iter(self._keys)
        for one in itertools.islice(keys, used):
            last = sum_of_keys(one, last)
        if (following := next(keys, _NONE)) is _NONE:  # asked for now: here samplers draw what the epoch's order is
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
        inner = getattr(self._keys, "sampler", None)
        return (self._keys,) if inner is None else (self._keys, inner)

    def _numbered(self, epoch: int, first: int, keys: Iterable[Any], last: int) -> Iterator[tuple[int, int, Any]]:
        for number, one in enumerate(keys, first):
            last = sum_of_keys(one, last)
            self._sums.append(last)
            yield epoch, number, one

    def _seen(self, keys: Iterator[Any]) -> Iterator[Any]:
        """Yield the keys, and see whether random numbers are drawn for the first of them."""
        for _ in range(_WATCHED):
            before = randomness.capture()
            one = next(keys, _NONE)
            if not randomness.stands(before):
                self.lacks = (
                    f"{type(self._keys).__name__} draws random numbers in the midst of an epoch, as training does"
                )
            if one is _NONE:
                return
            yield one
        yield from keys


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
    """A data set whose samples draw from generators seeded by (seed, epoch, batch, place in the batch, key).

    A sampler may draw a sample twice in an epoch: it is augmented otherwise each time. A data set that fetches whole
    batches is seeded once a batch.
    """

    def __init__(self, dataset: Any, seed: int, *, together: bool) -> None:
        self._dataset, self._seed, self._together = dataset, seed, together
        self._fetch = getattr(dataset, "__getitems__", None) if together and fetches_batches(dataset) else None

    def __getitems__(self, batch: tuple[int, int, Any]) -> Fetched:
        """Return the samples of a batch; the generators are left as they were."""
        epoch, number, keys = batch
        keys = list(keys) if self._together else [keys]
        first = _number_of(keys[0]) if keys else 0
        with randomness.kept():
            if self._fetch is not None:
                randomness.seed_sample(randomness.mix(self._seed, epoch, number, first))
                samples = self._fetch(keys)
            else:
                samples = [self._sample((epoch, number, place), key) for place, key in enumerate(keys)]
        return Fetched(samples, randomness.mix(self._seed, epoch, number, first, COLLATION))

    def _sample(self, place: tuple[int, int, int], key: Any) -> Any:
        randomness.seed_sample(randomness.mix(self._seed, *place, _number_of(key)))
        return self._dataset[key]


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


# A loader that says itself where it stands.


class Own:
    """What has state_dict() and load_state_dict(); it is asked when a checkpoint is made, and at no other time."""

    can_wait = False

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._own = randomness.generators_of(loader)
        self._loaded: Mapping[str, Any] | None = None
        self.lacks = ""
        self._apart: Apart | None = None
        workers = _workers_of(loader)
        if workers and _is_torchs(loader) and isinstance(loader.dataset, IterableDataset):
            self._apart = Apart(loader.dataset)
            loader.__dict__["dataset"] = self._apart  # which torch lets nobody exchange
            loader.collate_fn = ApartToo(loader.collate_fn)
        elif workers:
            self.lacks = "random numbers drawn in the workers of a loader with a state of its own are in no checkpoint"

    @property
    def rules(self) -> Mapping[str, Any]:
        """What it is."""
        return {"loader": type(self.loader).__name__, "workers": _workers_of(self.loader)}

    def first(self) -> dict[str, Any]:
        """Return what the random numbers of its batches depend on, and its own generators."""
        return {"origins": randomness.origins(), "own": randomness.states_of(self._own)}

    def put(self, first: Mapping[str, Any]) -> None:
        """Have its own generators so again."""
        randomness.put_states(self._own, first["own"])

    def open(self, epoch: int, used: int, first: Mapping[str, Any]) -> tuple[Iterator[Summed], int]:
        """Have it go on from its own state."""
        set_epoch(epoch, self.loader, getattr(self.loader, "dataset", None))
        if self._apart is not None:
            self._apart.origins = first["origins"]
            _end_workers(self.loader)
        with randomness.kept():  # torchdata begins twice where the state is that of an epoch's end
            batches = _begun(self.loader, self._loaded["state"] if self._loaded is not None else None)
        torch.empty((), dtype=torch.int64).random_()  # the next epoch begins from other generators
        if self._loaded is not None:
            randomness.put_states(self._own, self._loaded["own"])
            self._loaded = None
        if not _workers_of(self.loader):
            batches = drawn_apart(batches, used, first["origins"])
        return ((batch, 0) for batch in batches), 0

    def state(self) -> dict[str, Any]:
        """Return its own."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {"state": self.loader.state_dict(), "own": randomness.states_of(self._own)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Remember it until the epoch is opened."""
        self._loaded = state


def _end_workers(loader: Any) -> None:
    """Have an epoch begin with workers of its own: those that persist draw from where they are."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # noqa: SLF001


class Apart(IterableDataset[Any]):
    """A set in workers that knows where it is; each sample draws from generators of its number, in its worker.

    So nobody needs to keep the workers' generators.
    """

    def __init__(self, dataset: Any) -> None:
        self.origins: tuple[int, ...] = (0, 0, 0)
        self.number = 0  # of samples so far
        self._dataset = dataset
        self._samples: Any = None
        self._loaded: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._samples = iter(self._dataset)
        if self._loaded is not None:
            self._samples.load_state_dict(self._loaded)
            self._loaded = None
        while True:
            with randomness.apart(self.of_worker(), self.number):
                sample = next(self._samples, _NONE)
            if sample is _NONE:
                self.number = 0
                return
            self.number += 1
            yield sample

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def of_worker(self, *more: int) -> tuple[int, ...]:
        """Return what this worker's random numbers depend on."""
        worker = get_worker_info()
        return tuple(randomness.mix(origin, worker.id if worker else 0, *more) for origin in self.origins)

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, by the iterator's own word or the set's."""
        iterates = _has_state(self._samples)
        said = self._samples if iterates else self._dataset
        return {"number": self.number, "iterates": iterates, "state": said.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.number = state["number"]
        if state["iterates"]:
            self._loaded = state["state"]
        else:
            self._dataset.load_state_dict(state["state"])


class ApartToo:
    """A `collate_fn` that draws from generators of the number of samples so far."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch."""
        worker = get_worker_info()
        if worker is None or not isinstance(worker.dataset, Apart):
            return self._collate(samples)
        with randomness.apart(worker.dataset.of_worker(COLLATION), worker.dataset.number):
            return self._collate(samples)


def _begun(loader: Any, state: Any) -> Iterator[Any]:
    """Return its batches, from the state on if there is one. UsageError where it does not take that."""
    if state is None:
        return iter(loader)
    try:
        loader.load_state_dict(state)
        return iter(loader)
    except (AssertionError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"the {type(loader).__name__} does not take its state back: {error}",
            hint="make it as it was when the state was saved: the same data, batch size and number of workers",
        ) from error


# What can only be begun anew: nothing is handed out until what was trained on has passed.


class Reread:
    """An iterable without a state. Its workers draw the same again, being begun from the same generators."""

    lacks = ""
    can_wait = True

    def __init__(self, loader: Any) -> None:
        self._make: Callable[[], Any] = loader if not hasattr(loader, "__iter__") else lambda: loader
        self.loader = loader
        self._own = randomness.generators_of(loader)

    @property
    def rules(self) -> Mapping[str, Any]:
        """How many workers share the data, and what a batch is made of."""
        return {"workers": _workers_of(self.loader), "batch_size": getattr(self.loader, "batch_size", None)}

    def first(self) -> dict[str, Any]:
        """Return what the random numbers of its batches depend on, and its own generators."""
        return {"origins": randomness.origins(), "own": randomness.states_of(self._own)}

    def put(self, first: Mapping[str, Any]) -> None:
        """Have its own generators so again."""
        randomness.put_states(self._own, first["own"])

    def open(self, epoch: int, used: int, first: Mapping[str, Any]) -> tuple[Iterator[Summed], int]:
        """Read from the epoch's begin."""
        loader = self._make()
        set_epoch(epoch, loader, getattr(loader, "dataset", None))
        _end_workers(loader)
        batches = iter(loader)
        if not _workers_of(loader):
            batches = drawn_apart(batches, 0, first["origins"])
        last = 0
        for batch in itertools.islice(batches, used):
            last = sum_of_batch(batch)
        return ((batch, sum_of_batch(batch)) for batch in batches), last

    def state(self) -> dict[str, Any]:
        """Return nothing: there is none."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


def drawn_apart(batches: Iterator[Any], first: int, origins: tuple[int, ...]) -> Iterator[Any]:
    """Yield the batches, each drawn with random numbers of its own, those of training left alone.

    With the first of an epoch comes what its order is drawn from, which must be another in the next epoch.
    """
    for number in itertools.count(first):
        if not number:
            batch = next(batches, _NONE)
        else:
            with randomness.apart(origins, number):
                batch = next(batches, _NONE)
        if batch is _NONE:
            return
        yield batch


def sum_of_batch(batch: Any) -> int:
    """Return a sum of some of a batch's values: of each tensor's shape, and of a few of what it holds.

    What is on a GPU is not looked at, for that would wait for it.
    """
    if isinstance(batch, torch.Tensor):
        told = zlib.crc32(repr((batch.dtype, tuple(batch.shape))).encode())
        if batch.device.type != "cpu" or batch.layout is not torch.strided or not batch.numel():
            return told
        flat = batch.detach().reshape(-1) if batch.is_contiguous() else batch.detach()[:1].reshape(-1)
        few = flat[:: max(1, flat.numel() // _LOOKED_AT)][:_LOOKED_AT].contiguous()
        return zlib.crc32(few.view(torch.uint8).numpy().tobytes(), told)
    if isinstance(batch, Mapping):
        return zlib.crc32(repr([(str(name), sum_of_batch(part)) for name, part in batch.items()]).encode())
    if isinstance(batch, (list, tuple)) and any(isinstance(part, (torch.Tensor, Mapping)) for part in batch):
        return zlib.crc32(repr([sum_of_batch(part) for part in batch]).encode())
    return zlib.crc32(repr(batch).encode()) if isinstance(batch, (list, tuple, str, bytes, int, float)) else 0


def set_epoch(epoch: int, *things: Any) -> None:
    """Tell the epoch to those that want to know it."""
    for one in things:
        tell = getattr(one, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _workers_of(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0) or 0)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
