"""Training frameworks whose loops are their own: each module makes one of them save and resume by `gpucloud.resume`.

A framework is imported by its module alone, so that nobody needs one who does not use it. What they share is here: the
loader that each is given in its own one's place, whose batches are handed out by the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Wrapped

_NONE = object()


class Handed:
    """The loader as frameworks see it: what it has is found here too. `asked` is called ahead of each batch.

    Before a run is followed, the batches are the loader's own.
    """

    def __init__(self, loader: Any, asked: Callable[[], None] = lambda: None) -> None:
        self._loader = loader
        self._asked = asked
        self._batches: Wrapped | None = None

    def follow(self, run: resume.Run) -> None:
        """Have the batches be those of the run, from the one after its last step on."""
        self._batches = run.wrap(self._loader)
        self._batches.ends_elsewhere = True

    def enter(self, epoch: int) -> None:
        """Have the next `for` be of that epoch, unless the run is there, or further."""
        if self._batches is not None:
            self._batches.enter(epoch)

    @property
    def is_last(self) -> bool:
        """Whether the batch handed out last is known to be the epoch's last one."""
        return self._batches is not None and self._batches.handed.batch == self._batches.length

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch."""
        if self._batches is None:
            yield from self._loader
            return
        found = iter(self._batches)
        while True:
            self._asked()
            batch = next(found, _NONE)
            if batch is _NONE:
                return
            yield batch


def keeps_by_itself(hint: str) -> UsageError:
    """Return the refusal of DeepSpeed, with how its own checkpoints are kept."""
    return UsageError("DeepSpeed keeps weights and optimizer where no other checkpoint finds them", hint=hint)
