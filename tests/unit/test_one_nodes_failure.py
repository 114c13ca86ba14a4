"""What one machine answers, or does not, is something seen of that machine: no supervisor ends for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.node.gate.report import Checked, Finding, Report, fail
from gpucloud.domain.supervision.action import Inspect
from gpucloud.ports import Completed
from gpucloud.usecases.supervise.inspection import Inspector
from gpucloud.usecases.supervise.look import PeerReports
from gpucloud.usecases.supervise.prepare import free_ports
from tests.fakes import fleet_shell
from tests.fakes.agent import Training
from tests.faults.process import run
from tests.faults.rig import GROUP, JOB, Outside
from tests.faults.strikes import Strikes
from tests.unit.test_lying_states import left_to_its_machines, state
from tests.unit.worlds import NOW, node, snapshot

Fault = Callable[[str], Completed]


def unreachable(node_id: str) -> Completed:
    raise HostUnreachable(f"{node_id}: connection refused")


def answers(exit_code: int, stdout: bytes, stderr: bytes = b"") -> Fault:
    return lambda _: Completed(exit_code=exit_code, stdout=stdout, stderr=stderr)


def is_port(argv: tuple[str, ...]) -> bool:
    return len(argv) > 3 and argv[1] == "-c" and "socket" in argv[2]


def is_order(argv: tuple[str, ...]) -> bool:
    return argv[:2] == ("sh", "-c") and argv[-1].endswith("/agent/desired.json")


FAULTS = {
    "no answer when asked for a port": (is_port, unreachable),
    "no port is free": (is_port, answers(1, b"", b"OSError: no more")),
    "a port that is none": (is_port, answers(0, b"ready\n")),
    "all ports are taken": (is_port, answers(0, b"32768 60999\n")),
    "an order that it cannot write": (is_order, answers(1, b"", b"No space left on device")),
}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "one machine for ever"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_is_done_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, lasting: bool) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=40, every=5, step_s=0.5))
    key = tmp_path / "home" / "keys" / "made" / JOB
    key.parent.mkdir(parents=True)
    key.write_text("k")
    asks, answer = FAULTS[fault]
    struck: list[str] = []

    def hit(host: fleet_shell.FleetHost, argv: tuple[str, ...], **options: object) -> Completed:
        if asks(argv) and (not struck or (lasting and struck[0] == host.node.id)):
            struck.append(host.node.id)
            return answer(host.node.id)
        return real(host, argv, **options)

    real = fleet_shell.FleetHost.run
    monkeypatch.setattr(fleet_shell.FleetHost, "run", hit)
    strikes = Strikes()
    ended = run(("train", str(outside.file)), outside.over(strikes), strikes)
    assert struck
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("command", ["train", "down"])
def test_a_machine_that_is_listed_no_more_when_somebody_comes_keeps_nobody_from_its_job(
    tmp_path: Path, rank: int, command: str
) -> None:
    """A laptop slept while it was taken, for longer than the cloud lists what has ended; the other one lives."""
    outside = left_to_its_machines(tmp_path, drive=False, steps=200)
    attempt = state(outside).attempt
    assert attempt is not None
    taken = attempt.members[rank].node_id
    outside.cloud.interrupt(GROUP, taken, notice=False)
    outside.cloud.forget(GROUP, taken)
    strikes = Strikes()
    asked = str(outside.file) if command == "train" else JOB
    ended = run((command, asked), outside.over(strikes), strikes)
    assert (ended.code, outside.cloud.describe(GROUP).alive) == (0, ()), ended.stderr
    assert state(outside).attempts[0].reason is not None


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"12001",
        b"1 2",
        b"1 2 80",
        b"1 2 -1",
        b"1 2 12001 80",
        b"9" * 5000,
        b"1 2 12001\n1 2 12001",
        "1 2 ٣".encode(),
    ],
)
def test_a_node_names_none_but_the_ports_that_it_was_asked_for(said: bytes) -> None:
    shell = SimpleNamespace(host=lambda _: SimpleNamespace(run=lambda *_, **__: answers(0, said)("a")))
    with pytest.raises(NodeError) as refused:
        free_ports(shell, node("a"), "python3", (12001, 12002))
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


class Later:
    """An executor whose work is done when it is asked for."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []

    def submit(self, work: Callable[..., object], *arguments: object) -> Future[object]:
        self.given.append(lambda: work(*arguments))
        return Future()


class Forgetful:
    """A preparer that forgets what it made of a node once it was asked."""

    def __init__(self) -> None:
        self.made = {"a": SimpleNamespace(base_python="python3", package_path="p", root="r", python="python3")}

    def made_of(self, node_id: str) -> object:
        return self.made.pop(node_id)

    def node(self, node_id: str) -> object:
        return node(node_id)


def silent_world() -> SimpleNamespace:
    def run(*_: object, **__: object) -> Completed:
        raise HostUnreachable("gone")

    resources = SimpleNamespace(gpu=("T4",), vram_gib=None, gpus=1)
    job = SimpleNamespace(cloud=Cloud.LOCAL, resources=resources, image=None, gate=None, run="x")
    shell = SimpleNamespace(host=lambda _: SimpleNamespace(run=run))
    return SimpleNamespace(shell=shell, job=job, clock=SimpleNamespace(now=lambda: NOW))


def test_a_look_tells_gpus_that_others_use_from_bad_ones_and_since_when(node_says: Callable[..., SimpleNamespace]):
    used, xid = fail("in-use", "it is in use by python (pid 7)", "wait", 0), fail("xid", "Xid 79", "replace it", 1)
    pool, bootstrapper = Later(), Forgetful()
    inspector = Inspector(services=node_says((used,), (used,), (used, xid), ()), bootstrapper=bootstrapper, pool=pool)
    made, found = dict(bootstrapper.made), []
    for _ in range(4):
        bootstrapper.made.update(made)
        inspector.start(Inspect(number=1, node_ids=("a",)), snapshot(group_size=1))
        look = Future[Any]()
        look.set_result(pool.given.pop()())
        inspector._work = look
        inspection = inspector.snapshot()
        assert inspection is not None
        found.append((inspection.bad, [(one.why, one.since) for one in inspection.in_use], inspection.over_at))
    why, at = "GPU 0: it is in use by python (pid 7)", [NOW + timedelta(seconds=n) for n in range(4)]
    assert found == [
        ((), [(why, at[0])], at[0]),
        ((), [(why, at[0])], at[1]),
        ((("a", f"{why}; GPU 1: Xid 79"),), [], at[2]),
        ((), [], at[3]),
    ]


@pytest.fixture
def node_says() -> Callable[..., SimpleNamespace]:
    """A world whose node gives these findings, one look after the other, each a second later."""

    def made(*findings: tuple[Finding, ...]) -> SimpleNamespace:
        answers_ = iter(findings)
        times = (NOW + timedelta(seconds=n) for n in itertools.count())

        def run(*_: object, **__: object) -> Completed:
            checked = Checked(report=Report(at=NOW), findings=next(answers_))
            return Completed(exit_code=0, stdout=to_json(checked).encode(), stderr=b"")

        world = silent_world()
        world.shell = SimpleNamespace(host=lambda _: SimpleNamespace(run=run))
        world.clock = SimpleNamespace(now=lambda: next(times))
        return world

    return made


@pytest.mark.parametrize("who", ["the look before an attempt", "a knock by its peer"])
def test_a_machine_that_is_forgotten_while_others_work_with_it_breaks_nothing(who: str) -> None:
    pool, bootstrapper = Later(), Forgetful()
    if who == "a knock by its peer":
        PeerReports(services=silent_world(), bootstrapper=bootstrapper, pool=pool)._ask(node("b"), [node("a")])
    else:
        Inspector(services=silent_world(), bootstrapper=bootstrapper, pool=pool).start(
            Inspect(number=1, node_ids=("a",)), snapshot(group_size=1)
        )
    bootstrapper.made.clear()
    (work,) = pool.given
    work()  # raises nothing
