"""Many runs, each from its seed: one after the other, or on every core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tests.prove.goal import Form

T = TypeVar("T")


def each(work: Callable[[int], T], count: int, form: Form) -> Iterator[tuple[int, T]]:
    """Yield every seed below `count` with what `work` returns for it; `work` is a module's own function."""
    if form is Form.SHORT:
        yield from ((seed, work(seed)) for seed in range(count))
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from enumerate(pool.map(work, range(count), chunksize=20))
