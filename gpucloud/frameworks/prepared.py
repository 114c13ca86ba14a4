"""Batches of Hugging Face's Accelerate, gone on with by a run: its loader outside, `run.wrap` inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device, synchronize_rng_states

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Wrapped

_NONE = object()


class Prepared:
    """A loader that `accelerator.prepare` returned; what it has is found here too.

    Its own `for` fetches a batch ahead, to know the last one: what that draws would be in no checkpoint. Here the
    length tells, so that of a stream without one, no batch is called the last.
    `asked` is called ahead of each batch.
    """

    def __init__(self, shard: Any, asked: Callable[[], None] = lambda: None) -> None:
        if type(shard) is not DataLoaderShard:
            raise UsageError(
                f"the batches of a {type(shard).__name__} are read by one rank for all, and cannot be continued",
                hint="have each rank read its share: Trainer's accelerator_config={'dispatch_batches': False}, or "
                "Accelerate's DataLoaderConfiguration(dispatch_batches=False)",
            )
        self._shard = shard
        self._asked = asked
        self._batches: Wrapped | None = None

    def follow(self, run: resume.Run) -> None:
        """Have the batches be those of the run, from the one after its last step on."""
        self._batches = run.wrap(self._shard.base_dataloader)

    def set_epoch(self, epoch: int) -> None:
        """Have the next `for` be of that epoch, unless the run is there, or further."""
        if self._batches is not None:
            self._batches.enter(epoch)

    def __len__(self) -> int:
        return len(self._shard)

    def __getattr__(self, name: str) -> Any:
        if "_shard" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._shard, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches on the rank's device."""
        shard, batches = self._shard, self._batches
        if batches is None:
            yield from shard
            return
        if shard.rng_types is not None:
            synchronize_rng_states(shard.rng_types, shard.synchronized_generator)
        shard.begin()
        found = iter(batches)
        try:
            while True:
                self._asked()
                batch = next(found, _NONE)
                if batch is _NONE:
                    return
                shard.end_of_dataloader = batches.handed.batch == batches.length
                yield batch if shard.device is None else send_to_device(batch, shard.device)
        finally:
            shard.end()
