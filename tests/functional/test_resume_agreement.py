"""Ranks agree on what to do without waiting for each other at quick steps, and all do it at the same step."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpucloud.domain.checkpoint.manifest import Why
from gpucloud.domain.errors import UsageError
from gpucloud.resume.folder import AttemptFolder
from gpucloud.resume.save import agreement
from gpucloud.resume.save.agreement import Agreed, Agreement, Call, Here, News
from gpucloud.resume.save.cadence import Cadence, Window
from tests.standins.saved_runs import SavedRun, forking

_WITHIN_S = 30.0


class Talk:
    """What two ranks have told each other, by the number of the occasion."""

    def __init__(self) -> None:
        self.told: dict[int, list[tuple[int, ...]]] = {}
        self.changed = threading.Condition()


class Rank:
    """One of two ranks in one process, in place of `Ranks`."""

    world = 2

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.occasions = 0

    def comparison(self, _count: int) -> Comparing:
        return Comparing(self)

    def highest(self, *numbers: int) -> tuple[int, ...]:
        return Comparing(self).begun(numbers).highest()


class Comparing:
    """In place of `Comparison`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._number: int | None = None

    @property
    def is_under_way(self) -> bool:
        return self._number is not None

    def begun(self, numbers: tuple[int, ...]) -> Comparing:
        self._number, self._rank.occasions = self._rank.occasions, self._rank.occasions + 1
        with self._rank.talk.changed:
            self._rank.talk.told.setdefault(self._number, []).append(numbers)
            self._rank.talk.changed.notify_all()
        return self

    def highest(self) -> tuple[int, ...]:
        number, self._number = self._number, None
        assert number is not None
        talk = self._rank.talk
        with talk.changed:
            assert talk.changed.wait_for(lambda: len(talk.told[number]) == 2, _WITHIN_S), "the other rank is not there"
            return tuple(map(max, *talk.told[number]))


class Node:
    """A rank's agreement, and what its agent wishes."""

    def __init__(self, folder: Path, talk: Talk) -> None:
        folder.mkdir()
        self.folder = folder
        self.agreement = Agreement(Rank(talk), AttemptFolder(folder))  # type: ignore[arg-type]
        self.step = 0

    def passes(self, **options: Any) -> bool:
        """Come to the end of the next step."""
        self.step += 1
        return self.agreement.is_silent() or self.agreement.passes(self.here(**options))

    def reach(self, call: Call = Call.STEP, **options: Any) -> Agreed:
        """Agree at the end of that step."""
        return self.agreement.reach(self.here(**options), News(), call)

    def here(self, *, window: Window = Window.CLOSED, due: bool = False, free: int = 1000) -> Here:
        return Here(self.step, window, due, free, 1)

    def train(self, steps: int, cadence: Cadence, each: Callable[[int], None] = lambda _: None) -> list[str]:
        """Return what became of each step, until one is to stop."""
        found = []
        while len(found) < steps:
            each(step := self.step + 1)
            silent = self.agreement.is_silent()
            due, free = cadence.falls_on(step), cadence.free_after(step)
            if silent or self.passes(due=due, free=free):
                self.step = step
                found.append("silent" if silent else "passes")
                continue
            agreed = self.reach(due=due, free=free)
            found.append("stop" if agreed.stop else "save" if agreed.due else "waits")
            if agreed.stop:
                break
        return found


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """Two that have agreed on their first steps, and look for wishes at each; no step of theirs is a slow one."""
    monkeypatch.setattr(agreement, "LOOK_S", 0.0)
    monkeypatch.setattr(agreement, "_QUICK_S", math.inf)
    talk = Talk()
    first, second = Node(tmp_path / "0", talk), Node(tmp_path / "1", talk)
    for _ in range(2):
        assert [first.passes(), second.passes()] == [False, False]
        assert [agreed.stop for agreed in both(first.reach, second.reach)] == [None, None]
    return first, second


def both(*calls: Callable[[], Any]) -> list[Any]:
    """Have both ranks make a call at the same time."""
    with ThreadPoolExecutor(2) as threads:
        return [done.result() for done in [threads.submit(call) for call in calls]]


def test_at_a_quick_step_no_rank_waits_for_the_other(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    assert first.passes()
    assert second.passes()
    assert second.passes()  # the first is a step behind
    assert first.passes()


def test_what_one_node_wishes_is_done_by_all_at_the_step_after_it(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    assert [first.passes(), second.passes()] == [True, True]
    (second.folder / "stop.json").write_text('{"reason": "notice", "at": null}')
    assert [first.passes(), second.passes()] == [True, True]
    assert [first.passes(), second.passes()] == [False, False]
    assert [agreed.stop for agreed in both(first.reach, second.reach)] == [Why.NOTICE] * 2
    assert [first.passes(), second.passes()] == [False, False]


def test_a_wish_for_a_save_is_waited_for_until_it_is_granted_and_then_no_more(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    (first.folder / "save.json").write_text('{"since": 7}')
    assert [first.passes(), second.passes()] == [True, True]
    for window, asked_for in ((Window.OPEN, False), (Window.CLOSED, True)):
        assert [first.passes(), second.passes()] == [False, False]
        reached = both(lambda w=window: first.reach(window=w), second.reach)
        assert [agreed.asked_for for agreed in reached] == [asked_for] * 2
    for node in nodes:
        node.agreement.granted()
    assert [first.passes(), second.passes()] == [False, False]  # nobody has told of a granted wish yet
    assert [agreed.asked_for for agreed in both(first.reach, second.reach)] == [False] * 2
    assert [first.passes(), second.passes()] == [True, True]


def test_a_save_by_the_number_of_steps_is_made_at_that_step(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    assert [first.passes(free=0), second.passes()] == [True, True]
    assert [first.passes(due=True), second.passes()] == [False, False]
    assert [agreed.due for agreed in both(lambda: first.reach(due=True), second.reach)] == [True, True]


def test_a_save_that_is_due_by_the_clock_is_made_at_the_step_after(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    assert [first.passes(due=True), second.passes()] == [True, True]
    assert [first.passes(), second.passes()] == [False, False]
    assert [agreed.due for agreed in both(first.reach, second.reach)] == [True, True]


def test_after_a_slow_step_all_wait_at_the_next(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nodes
    monkeypatch.setattr(agreement, "_QUICK_S", 0.0)
    assert [first.passes(), second.passes()] == [True, True]
    assert [first.passes(), second.passes()] == [False, False]


@pytest.mark.parametrize("call", [Call.STEP_ASKED, Call.SAVE, Call.END])
def test_where_one_rank_is_elsewhere_both_are_told(nodes: tuple[Node, Node], call: Call) -> None:
    first, second = nodes
    assert [first.passes(), second.passes(), first.passes()] == [True] * 3
    with pytest.raises(UsageError, match=r"one rank is at run.step\(\) while another is at "):
        second.reach(call=call)
    with pytest.raises(UsageError, match=r"one rank is at run.step\(\) while another is at "):
        first.passes()


def test_a_lone_rank_has_nobody_to_ask(nodes: tuple[Node, Node]) -> None:
    assert not nodes[0].agreement.is_alone
    nodes[0].agreement._ranks.world = 1
    assert nodes[0].agreement.is_alone


@pytest.mark.parametrize("cadence", [Cadence(), Cadence(every_steps=7), Cadence(every_steps=1)])
def test_at_quick_steps_ranks_are_silent_at_the_same_ones_and_act_at_the_same(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, cadence: Cadence
) -> None:
    monkeypatch.setattr(agreement, "LOOK_S", 0.02)
    first, second = nodes
    wish_at = 400

    def wish(step: int) -> None:
        time.sleep(0.02 / 10)
        if step == wish_at:
            (second.folder / "stop.json").write_text('{"reason": "notice", "at": null}')

    found, other = both(lambda: first.train(500, cadence), lambda: second.train(500, cadence, wish))
    assert found == other
    if cadence.every_steps:
        due = range(cadence.every_steps, len(found) + 2, cadence.every_steps)
        assert all(found[step - 3] == "save" for step in due if step > 3)  # the third is the first of them
    if cadence.every_steps != 1:
        assert found.count("silent") > len(found) / 3
        runs = [len(list(steps)) for kind, steps in itertools.groupby(found) if kind == "silent"]
        assert max(runs) <= 4
    assert found[-1] == "stop"
    # What is wished is looked for after 20 ms, told at a step that is not silent, and known to all at the next.
    assert wish_at - 2 <= len(found) <= wish_at + 40


def test_where_one_rank_saves_at_a_silent_step_of_the_other_or_elsewhere_both_are_told(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    monkeypatch.setattr(agreement, "LOOK_S", 1000.0)
    assert [first.passes(), second.passes()] == [True, True]  # told
    assert [first.passes(), second.passes()] == [True, True]  # silent
    with pytest.raises(UsageError, match="one rank is at step 4 while another is at step 5"):
        both(lambda: (first.passes(), first.reach(call=Call.SAVE)), lambda: second.reach(call=Call.SAVE))


def test_ranks_of_which_one_is_asked_to_stop_leave_at_the_same_step_and_end_with_the_same_bits(tmp_path: Path) -> None:
    with forking():
        whole = SavedRun(tmp_path / "whole", ranks=2, steps=30, every=1000)
        assert whole.attempt() == [0, 0]
        run = SavedRun(tmp_path / "run", ranks=2, steps=30, every=1000)

        def ask(rank: int) -> None:
            if rank == 1:
                (run.folder / "attempt-1-1/stop.json").write_text('{"reason": "notice", "at": null}')

        assert run.attempt(ask) == [75, 75]
        left = {(run.folder / f"attempt-1-{rank}/left-{rank}.json").read_text().partition(",")[2] for rank in range(2)}
        assert len(left) == 1
        assert run.attempt() == [0, 0]
    assert run.digests() == whole.digests()
