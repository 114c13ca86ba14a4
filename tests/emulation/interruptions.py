"""Nodes of a fleet taken at random times, the same for the same seed."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.domain.node.node import NodeState


@dataclass(frozen=True, slots=True)
class Draw:
    gap_s: float
    announced: bool
    which: float


def draws(seed: int, *, mean_s: float, unannounced: float) -> Iterator[Draw]:
    """Yield interruptions: seconds since the one before, whether a notice comes first, and which node, from 0 to 1."""
    dice = random.Random(seed)
    while True:
        yield Draw(dice.expovariate(1 / mean_s), dice.random() >= unannounced, dice.random())


@contextlib.contextmanager
def interrupted(
    nodes: LocalNodeGroup, group: str, *, seed: int, mean_s: float, unannounced: float = 0.0
) -> Iterator[None]:
    """Take one of the group's nodes every `mean_s` seconds on average; `unannounced` is the share without notice."""
    over = threading.Event()

    def take() -> None:
        for draw in draws(seed, mean_s=mean_s, unannounced=unannounced):
            if over.wait(draw.gap_s):
                return
            up = [node for node in nodes.describe(group).alive if node.state is NodeState.RUNNING]
            if up:
                nodes.interrupt(group, up[int(draw.which * len(up))].id, notice=draw.announced)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
