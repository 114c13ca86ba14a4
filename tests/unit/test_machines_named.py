"""Which machine `--node` means: its whole name, or the beginning that a narrow table has of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucloud.cli.machines import one_node
from gpucloud.domain.errors import UsageError
from gpucloud.domain.node import GroupView
from tests.faults.process import run
from tests.faults.rig import GROUP, JOB, Outside
from tests.faults.strikes import Strikes


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


def unique(name: str, other: str) -> str:
    return next(name[:end] for end in range(1, len(name) + 1) if not other.startswith(name[:end]))


@pytest.mark.parametrize(("name", "why"), [("i-", "has several nodes that begin with i-"), ("x", "has no node x")])
def test_what_means_none_or_several_is_refused_with_all_of_them(outside: Outside, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        meant(outside, name)
    assert refused.value.hint == f"one of {', '.join(alive(outside))}"
