"""The random times at which tests take nodes."""

from __future__ import annotations

import itertools

from tests.emulation.interruptions import Draw, draws


def some(seed: int, unannounced: float) -> list[Draw]:
    return list(itertools.islice(draws(seed, mean_s=10.0, unannounced=unannounced), 200))


def test_equal_seeds_give_equal_interruptions() -> None:
    assert some(7, 0.5) == some(7, 0.5)
    assert some(7, 0.5) != some(8, 0.5)


def test_interruptions_come_at_the_mean_to_every_node_and_announced_as_asked() -> None:
    found = some(7, 0.25)
    assert 8.0 < sum(draw.gap_s for draw in found) / 200 < 12.0
    assert 70 < sum(draw.which >= 0.5 for draw in found) < 130
    assert 30 < sum(not draw.announced for draw in found) < 70
    assert all(draw.announced for draw in some(7, 0.0))
    assert not any(draw.announced for draw in some(7, 1.0))
