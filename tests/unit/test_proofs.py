"""Every proof says what it promises: a module beside them that is none would end all of them."""

from __future__ import annotations

from tests.prove.__main__ import GOALS, goal


def test_each_proof_says_what_it_promises_and_what_is_real_in_it() -> None:
    assert len(GOALS) > 40
    for name in GOALS:
        one = goal(name)
        assert all((one.promise, one.real, one.simulated)), name
