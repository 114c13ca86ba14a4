"""Large objects of a fake store, by way of its whole ones."""

from __future__ import annotations

from collections.abc import Sequence

from gpucloud.domain.checkpoint.objects import Sums, sums_of
from gpucloud.store.contract import Heard, unheard


class WholeObjects:
    """Gives a fake with `get` and `put` the rest of what `ObjectStore` promises about bytes."""

    def write(self, key: str, pieces: Sequence[memoryview], heard: Heard = unheard) -> Sums:
        self.put(key, b"".join(pieces))
        heard()
        return sums_of(pieces)

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        stored = self.get(key)
        if stored is None or len(stored.data) < at + into.nbytes:
            return False
        into.cast("B")[:] = stored.data[at : at + into.nbytes]
        return True
