"""Batches of Hugging Face's Accelerate, gone on with by a run: its loader outside, `run.wrap` inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device, synchronize_rng_states

from gpucloud.domain.errors import UsageError
from gpucloud.frameworks.handed import Handed


class Prepared(Handed):
    """A loader that `accelerator.prepare` returned.

    Its own `for` fetches a batch ahead, to know the last one: what that draws would be in no checkpoint. Here the
    length tells, so that of a stream without one, no batch is called the last.
    """

    def __init__(self, shard: Any, asked: Callable[[], None] = lambda: None) -> None:
        if type(shard) is not DataLoaderShard:
            raise UsageError(
                f"the batches of a {type(shard).__name__} are read by one rank for all, and cannot be continued",
                hint="have each rank read its share: Trainer's accelerator_config={'dispatch_batches': False}, or "
                "Accelerate's DataLoaderConfiguration(dispatch_batches=False)",
            )
        super().__init__(shard.base_dataloader, asked)
        self._shard = shard

    def set_epoch(self, epoch: int) -> None:
        """Have the next `for` be of that epoch, unless the run is there, or further."""
        self.enter(epoch)

    def __getattr__(self, name: str) -> Any:
        if "_shard" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._shard, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch, on the rank's device."""
        shard = self._shard
        if self._batches is None:
            yield from shard
            return
        if shard.rng_types is not None:
            synchronize_rng_states(shard.rng_types, shard.synchronized_generator)
        shard.begin()
        try:
            for batch in super().__iter__():
                shard.end_of_dataloader = self.is_last
                yield batch if shard.device is None else send_to_device(batch, shard.device)
        finally:
            shard.end()
