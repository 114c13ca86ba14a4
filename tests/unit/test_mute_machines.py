"""A machine that answers, and whose agent tells nothing that can be read, is prepared again and then given up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from gpucloud.domain.state.state import UsageInterval
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.membership import believed_dead
from gpucloud.domain.supervision.snapshot import Limits, Rules
from gpucloud.domain.untrusted import STATUS_BYTES
from gpucloud.ports import Completed
from gpucloud.usecases.supervise.observe import _Memory
from tests.fakes import fleet_shell
from tests.fakes.agent import Training
from tests.faults.process import run
from tests.faults.rig import JOB, Outside, _Cloud
from tests.faults.strikes import Strikes
from tests.unit.worlds import NOW, POOL, part, snapshot, state, up

ALONE = timedelta(seconds=60)
WORDS: dict[str, Callable[[Completed], Completed]] = {
    "no JSON": lambda said: replace(said, stdout=b"\x1b[2J{"),
    "a status of no kind that is known": lambda said: replace(said, stdout=b'{"format": 99}'),
    "more than any status": lambda said: replace(said, stdout=b" " * (STATUS_BYTES + 1)),
    "no file": lambda said: replace(said, exit_code=1, stdout=b""),
}


def is_status(argv: tuple[str, ...]) -> bool:
    return len(argv) == 2 and argv[0] == "cat" and argv[1].endswith("/agent/status.json")


class Muting:
    """One machine's status is another word from its `after`-th reading on; `mute` is its id."""

    def __init__(self, word: Callable[[Completed], Completed], after: int) -> None:
        self.mute = ""
        reads: dict[str, int] = defaultdict(int)
        real = fleet_shell.FleetHost.run

        def run(host: fleet_shell.FleetHost, argv: tuple[str, ...], **options: object) -> Completed:
            said = real(host, argv, **options)
            if is_status(argv) and said.exit_code == 0:
                reads[host.node.id] += 1
                if self.mute in ("", host.node.id) and reads[host.node.id] > after:
                    self.mute = host.node.id
                    return word(said)
            return said

        self.run = run


def trained_beside(muting: Muting, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train on two machines of which one falls mute; return what was said."""
    outside = Outside(folder, training=Training(nodes=2, steps=60, every=5, step_s=0.5))
    key = folder / "home" / "keys" / "made" / JOB
    key.parent.mkdir(parents=True)
    key.write_text("k")
    monkeypatch.setattr(fleet_shell.FleetHost, "run", muting.run)
    cloud_profile = replace(_Cloud.cloud_profile, rules=Rules(limits=Limits(alone=ALONE)))
    monkeypatch.setattr(_Cloud, "cloud_profile", cloud_profile)
    strikes = Strikes()
    ended = run(("train", str(outside.file)), outside.over(strikes), strikes)
    assert ended.code == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("after", [0, 20], ids=["from the first", "in an attempt"])
@pytest.mark.parametrize("word", WORDS)
def test_a_job_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, after: int) -> None:
    muting = Muting(WORDS[word], after)
    said = trained_beside(muting, tmp_path, monkeypatch)
    assert said.count(f"preparing {muting.mute}") == 2, "it was not prepared again, or more than once"
    assert f"{muting.mute} does not answer, and nothing else shows that it lives: it is given up" in said


@pytest.mark.parametrize(("mute_s", "dead"), [(0.0, False), (599.0, False), (600.0, True)])
def test_it_is_waited_for_as_long_as_for_a_silent_one_of_which_nobody_can_tell(mute_s: float, dead: bool) -> None:
    node = replace(up("b", part(1)), mute_for=timedelta(seconds=mute_s))
    assert believed_dead(node, snapshot(up("a", part(1)), node), Limits()) is dead


def told(memory: _Memory, heartbeat: int | None, at_s: float) -> timedelta:
    """Have it answer with that beat, or with nothing that can be read; return for how long it is mute then."""
    status = up("a").status
    assert status is not None
    now = NOW + timedelta(seconds=at_s)
    memory.told(None if heartbeat is None else replace(status, heartbeat=heartbeat), now)
    return memory.mute_for(now)


def test_an_agent_that_writes_now_and_then_is_not_mute() -> None:
    memory = _Memory(answered_at=NOW)
    assert not any(told(memory, at // 4, at) for at in range(100))


def test_an_agent_that_writes_no_more_is_mute_until_it_writes() -> None:
    memory = _Memory(answered_at=NOW)
    told(memory, 1, 0)
    assert told(memory, 1, 1) == timedelta(0)
    assert told(memory, 1, 11) == timedelta(seconds=10)
    assert told(memory, None, 21) == timedelta(seconds=20)
    assert told(memory, 2, 22) == timedelta(0)


def test_who_comes_after_goes_on_counting() -> None:
    node = replace(up("a"), mute_for=timedelta(seconds=300))
    before = state(nodes=(UsageInterval(node_id="a", pool=POOL, launched_at=NOW),))
    (interval,) = transitions.since(before, snapshot(node, state=before), 1).nodes
    assert interval.silent_at == NOW - timedelta(seconds=300)
    memory = _Memory(answered_at=NOW, silent_at=interval.silent_at)
    assert told(memory, None, 10) == timedelta(seconds=310)
