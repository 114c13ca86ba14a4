"""Which machine `--node` means: its whole name, or the beginning that a narrow table has of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.cli.target import node_of, one_node
from gpucloud.domain.errors import UsageError
from gpucloud.domain.node.node import NO_GROUP, GroupView, NodeState
from tests.faults.process import run
from tests.faults.rig import GROUP, JOB, Outside
from tests.faults.strikes import Strikes
from tests.unit.worlds import node, opened


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    found = Outside(tmp_path)
    run(("up", str(found.file)), found.over(Strikes()), Strikes())
    return found


def alive(outside: Outside) -> list[str]:
    return [node.id for node in listed(outside).alive]


def listed(outside: Outside) -> GroupView:
    return outside.cloud.describe(GROUP)


def meant(outside: Outside, name: str | None) -> str:
    cloud = outside.over(Strikes())
    known = cloud.home.find(JOB)
    assert known is not None
    return one_node(cloud, known, name).id


def test_the_whole_name_and_a_beginning_of_one_machine_alone_mean_it(outside: Outside) -> None:
    first, second = alive(outside)
    assert (meant(outside, None), meant(outside, second)) == (first, second)
    assert meant(outside, unique(second, first)) == second


def test_a_whole_name_with_which_another_one_begins_means_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = tuple(node(name) for name in ("vm-1a", "vm-1", "vm-1b"))
    group = replace(NO_GROUP, nodes=machines)
    asker = SimpleNamespace(listed=lambda _: group, state=lambda: SimpleNamespace(group=GROUP))
    monkeypatch.setattr("gpucloud.cli.target.asker_of", lambda *_: asker)
    cloud: Any = SimpleNamespace()
    known: Any = SimpleNamespace(name=JOB)
    assert one_node(cloud, known, "vm-1").id == "vm-1"


def test_another_machine_than_that_of_rank_0_is_taken_once_that_is_gone_and_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = replace(NO_GROUP, nodes=(node("vm-2"), node("vm-3")))
    trained = SimpleNamespace(group=GROUP, attempts=(opened("vm-3", "vm-2"),))
    asker = SimpleNamespace(listed=lambda _: group, state=lambda: trained)
    monkeypatch.setattr("gpucloud.cli.target.asker_of", lambda *_: asker)
    cloud: Any = SimpleNamespace()
    known: Any = SimpleNamespace(name=JOB)
    assert (node_of(cloud, known, None).id, capsys.readouterr().err) == ("vm-3", "")
    trained.attempts = (opened("vm-1", "vm-2"),)
    assert node_of(cloud, known, None).id == "vm-2"
    said = "vm-1, which had rank 0, is not up any more: taking vm-2, whose files may be others\n"
    assert capsys.readouterr().err == said
    with pytest.raises(UsageError, match="has no node vm-1"):
        node_of(cloud, known, "vm-1")


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ((), f"{JOB} has no machine that is up"),
        ((NodeState.TERMINATED,), f"{JOB} has no machine that is up"),
        ((NodeState.PENDING,), f"{JOB} has no machine that is up: 1 is still being started"),
        ((NodeState.PENDING, NodeState.PENDING), f"{JOB} has no machine that is up: 2 are still being started"),
    ],
)
def test_machines_that_are_on_their_way_are_told_where_none_is_up(
    monkeypatch: pytest.MonkeyPatch, states: tuple[NodeState, ...], said: str
) -> None:
    machines = tuple(replace(node(f"vm-{at}"), state=state) for at, state in enumerate(states))
    group = replace(NO_GROUP, nodes=machines)
    asker = SimpleNamespace(listed=lambda _: group, state=lambda: SimpleNamespace(group=GROUP))
    monkeypatch.setattr("gpucloud.cli.target.asker_of", lambda *_: asker)
    known: Any = SimpleNamespace(name=JOB)
    with pytest.raises(UsageError) as refused:
        one_node(SimpleNamespace(), known, None)  # type: ignore[arg-type]
    assert (refused.value.message, refused.value.hint) == (said, f"gpucloud status {JOB}")


def unique(name: str, other: str) -> str:
    return next(name[:end] for end in range(1, len(name) + 1) if not other.startswith(name[:end]))


@pytest.mark.parametrize(("name", "why"), [("i-", "has several nodes that begin with i-"), ("x", "has no node x")])
def test_what_means_none_or_several_is_refused_with_all_of_them(outside: Outside, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        meant(outside, name)
    assert refused.value.hint == f"one of {', '.join(alive(outside))}"
