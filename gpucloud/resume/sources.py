"""What a script's own loader reads from: which kind it is, and how one that is no map-style set is gone on with."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Source, Summed
from gpucloud.resume.loader import COLLATION, NONE, Order, has_state, set_epoch
from gpucloud.resume.state import randomness

_LOOKED_AT = 64  # values of a tensor


def source_of(loader: Any, seed: int, rank: int) -> Source:
    """Return the source that the loader is. UsageError for what hands out no batches.

    `seed` is what samples' random numbers depend on.
    """
    if _is_torchs(loader):
        tells = hasattr(loader.dataset, "state_dict")
        if not isinstance(loader.dataset, IterableDataset) and not tells:
            return Order(loader, seed, rank)
        return Own(loader) if tells and hasattr(loader, "load_state_dict") else Reread(loader)
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


# A loader that says itself where it stands.


class Own:
    """What has state_dict() and load_state_dict(); it is asked when a checkpoint is made, and at no other time."""

    kind = "from a loader's own state"
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
                sample = next(self._samples, NONE)
            if sample is NONE:
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
        iterates = has_state(self._samples)
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
    kind = "from an iterable that is read again"
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
            batch = next(batches, NONE)
        else:
            with randomness.apart(origins, number):
                batch = next(batches, NONE)
        if batch is NONE:
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


def _workers_of(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0) or 0)
