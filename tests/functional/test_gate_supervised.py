"""Supervision with the gate: fakes for the cloud, real agents in folders, a stand-in nvidia-smi of four H200."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.local.market import Devices, LocalMarket
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.transfer.outputs import OutputsFolder
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.job.spec import GatePolicy, Job, Resources
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.bootstrap.facts import SETUP_FAILED, FailedSetup
from gpucloud.domain.node.gate.gang import GangFacts, GangOrder, PairFacts
from gpucloud.domain.node.gate.report import Checked, Report, fail
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Inspect
from gpucloud.domain.supervision.quarantine import failures
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.ports import Completed
from gpucloud.store import open_store
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.job.start import Starter
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.machines import examine
from gpucloud.usecases.services import Package, Services
from gpucloud.usecases.supervise.bootstrap import Bootstrapped
from gpucloud.usecases.supervise.inspection import Inspector
from gpucloud.usecases.supervise.session import Session
from tests.fakes.node_group import FakeNodeGroup
from tests.fakes.provisioner import FakeProvisioner
from tests.fakes.shell import FakeShell
from tests.standins.agent_node import AgentNode
from tests.unit import worlds

DATA = Path(__file__).parent.parent / "data" / "nvidia_smi"
AT = datetime(2026, 11, 21, tzinfo=timezone.utc)
XID = fail("xid", "Xid 79 in the kernel's log since boot: the GPU has fallen off the bus", "replace the machine", 0)


class Provisioner(FakeProvisioner):
    """Makes the group where it makes the cluster."""

    def __init__(self, group):
        super().__init__()
        self.nodes = group

    def ensure(self, spec, *, story):
        return self.nodes.create(super().ensure(spec, story=story))

    def destroy(self, group, *, story):
        super().destroy(group, story=story)
        self.nodes.remove(group)


@dataclass
class Watcher:
    lines: list[str] = field(default_factory=list)

    def story(self, line):
        self.lines.append(line)

    def tick(self, snapshot, action, spend):
        pass

    def output(self, attempt, rank, text):
        pass


def answer(*findings):
    checked = Checked(report=Report(at=AT), findings=findings)
    return Completed(exit_code=14 if findings else 0, stdout=to_json(checked).encode(), stderr=b"")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a world whose nodes' gates answer as `gates` says, by the order of their launch."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {DATA}/h200x4.xml\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUCLOUD_PYTHON", sys.executable)
    homes = tmp_path / "homes"
    shells = []
    code = tmp_path / "code"
    code.mkdir()
    (code / "work.sh").write_text("echo worked\n")

    def make(gates, **changes):
        plain = {
            "name": "j",
            "run": "sh work.sh",
            "budget_usd": Decimal(5),
            "source": code / "j.yaml",
            "code": code,
            "resources": Resources(nodes=2, gpus=1, gpu=("H200",)),
            "gate": GatePolicy.QUICK,
        }
        job = Job(**{**plain, **changes})
        group = FakeNodeGroup(SystemClock())

        def answers(node, argv, stdin):
            return (
                gates(int(node.id.removeprefix("i-"), 16), argv, stdin)
                if len(argv) == 3 or argv[0] == "/layer/python"
                else None
            )

        data, sha256 = package_zip()
        shells.append(FakeShell(homes, answers))
        return Services(
            job=job,
            name="j",
            clock=SystemClock(),
            store=open_store(str(tmp_path / "store")),
            provisioner=Provisioner(group),
            group=group,
            market=LocalMarket(devices=lambda: Devices(uuids=("a", "b"), model="H200", vram_gib=140)),
            shell=shells[-1],
            outputs=OutputsFolder((), tmp_path / "out"),
            public_key="ssh-ed25519 AAAA",
            package=Package(data=data, sha256=sha256),
            rules=Rules(),
            period_s=0.05,
        )

    yield make
    for shell in shells:
        shell.end()
    for home in homes.iterdir() if homes.exists() else ():
        AgentNode(home, Path()).destroy()


def run(world):
    """Supervise the job to its end; return its state and the story."""
    starter = Starter(
        store=world.store, market=world.market, account=None, clock=world.clock, rules=Rules(), terms=Terms()
    )
    starter.start(world.job, b"name: j\n")
    watcher = Watcher()
    orders = Orders(jobs=world.jobs, clock=world.clock)
    return Session(services=world, orders=orders, watcher=watcher).run(), watcher.lines


def asked(world, word):
    return [node_id for node_id, argv in world.shell.calls if argv[2:3] == (word,)]


def test_a_bad_node_is_quarantined_ended_and_replaced_and_the_job_runs_on_good_ones(made):
    world = made(lambda n, argv, stdin: answer(XID) if n == 2 and argv[2] == "gate" else None)
    state, story = run(world)
    second = "i-00000000000000002"
    assert state.exit_reason is ExitReason.SUCCEEDED, story
    assert state.gpu == "H200"
    assert [(one.node_id, one.why) for one in state.quarantined] == [(second, str(XID))]
    assert ("terminate", "gpucloud-j", second, "bad") in world.group.calls
    assert [m.node_id for m in state.attempts[0].members] == ["i-00000000000000001", "i-00000000000000003"]
    assert f"{second} is not used any more: {XID}" in story


@pytest.mark.slow  # test_reconcile.py decides it
def test_three_bad_nodes_in_a_row_end_the_job_when_no_other_pool_has_good_ones(made):
    world = made(lambda n, argv, stdin: answer(XID) if argv[2] == "gate" else None)
    state, story = run(world)
    assert (state.exit_reason, state.exit_code) == (ExitReason.UNPREPARED, 14), story
    assert "nodes in a row were bad" in state.message
    assert "Xid 79" in state.message
    assert state.attempts == ()


def test_a_setup_that_cannot_work_ends_the_job_on_the_machines_that_it_has_and_its_log_is_kept(made):
    said = FailedSetup(command="pip install s3cr3t-of-mine", exit_code=1, log="getting ready\nno s3cr3t-of-mine\n")
    broken = Completed(exit_code=SETUP_FAILED, stdout=to_json(said).encode(), stderr=b"")
    world = made(lambda n, argv, stdin: broken if argv[2] == "layer" else None, setup="pip install $TOKEN")
    world = replace(world, secrets={"TOKEN": "s3cr3t-of-mine"})
    state, story = run(world)
    assert (state.exit_reason, state.exit_code, state.attempts) == (ExitReason.USER_ERROR, 20, ()), story
    assert state.message == "setup: `pip install **************` ended with exit code 1: no **************"
    assert {node_id for node_id, _ in world.shell.calls} == {"i-00000000000000001", "i-00000000000000002"}
    assert len(asked(world, "layer")) == 4
    (kept,) = world.jobs.records.log_parts()
    assert (kept.attempt, world.jobs.records.read_log(kept)) == (0, b"getting ready\nno **************\n")
    assert sum("setup failed twice on" in line for line in story) == 1
    assert not any("s3cr3t" in line for line in story)


def test_a_store_out_of_reach_ends_the_job_after_two_rounds_and_blames_none(made):
    away = fail("store", "the store at https://s3 cannot be reached: timed out", "let the machine reach it")
    world = made(lambda n, argv, stdin: answer(away) if argv[2] == "gate" else None)
    state, story = run(world)
    assert (state.exit_reason, state.exit_code, state.quarantined) == (ExitReason.UNPREPARED, 14, ()), story
    assert "the store at https://s3 cannot be reached: timed out; hint: let the machine reach it" in state.message
    # Two rounds, however many machines: what fails beside another counts once, and one may take long to fail.
    assert failures(state) == 2


def test_a_job_without_gpus_meets_no_gate(made):
    world = made(lambda n, argv, stdin: None, resources=Resources(nodes=2, gpus=2))
    state, story = run(world)
    assert state.exit_reason is ExitReason.SUCCEEDED, story
    assert (asked(world, "gate"), asked(world, "gang"), state.gpu, state.quarantined) == ([], [], None, ())
    assert not any("looking at the GPUs" in line for line in story)


class Prepared:
    """A preparer that has prepared everything."""

    def made_of(self, node_id):
        return Bootstrapped(
            python="/layer/python", base_python="/usr/bin/python3", package_path="/lib/g.zip", root="/r",
            findings=(), changed=(), seconds=(), lock={},
        )  # fmt: skip

    def node(self, node_id):
        return worlds.node(node_id, devices=("GPU-1",))


def gang_of(slow):
    """Answers in which these pairs of ranks are slow."""

    def gates(n, argv, stdin):
        if argv[2] == "gate":
            return answer()
        if argv[1] == "-c":  # for a free port
            return Completed(exit_code=0, stdout=f"32768 60999 {argv[5]}\n".encode(), stderr=b"")
        order = from_json(GangOrder, stdin)
        assert (order.address, order.python, order.devices) == ("127.0.0.10", "/layer/python", ("GPU-1",))
        assert 10_000 <= order.port < 32_000
        others = [other for other in range(order.world) if other != order.rank]
        pairs = tuple(
            PairFacts(one=min(p), other=max(p), gbps=0.1 if slow(*sorted(p)) else 9.0)
            for p in ((order.rank, other) for other in others)
        )
        snapshot = GangFacts(rank=order.rank, met=True, arrived=tuple(range(order.world)), pairs=pairs)
        return Completed(exit_code=0, stdout=to_json(snapshot).encode(), stderr=b"")

    return gates


def look(world, inspector, number, *nodes):
    inspector.start(Inspect(number=number, node_ids=nodes), worlds.snapshot(state=worlds.state(gpu="H200")))
    inspector._work.result(30)
    return inspector.snapshot().bad


def test_the_gang_is_checked_when_its_members_change_and_the_right_one_is_blamed(made):
    slow = {"rank": None}
    changes = {"run": "train.py", "gate": GatePolicy.FULL, "resources": Resources(nodes=3, gpu=("H200",))}
    world = made(gang_of(lambda one, other: slow["rank"] in (one, other)), **changes)
    with ThreadPoolExecutor(1) as pool:
        inspector = Inspector(services=world, bootstrapper=Prepared(), pool=pool)
        nodes = ("i-1", "i-2", "i-3")
        assert look(world, inspector, 1, *nodes) == ()
        assert len(asked(world, "gang")) == 3
        assert look(world, inspector, 2, *nodes) == ()
        assert len(asked(world, "gang")) == 3  # the same members passed before
        slow["rank"] = 1
        (found,) = look(world, inspector, 3, "i-1", "i-4", "i-3")
        assert found == ("i-4", "its network is too slow: 0.10 GB/s at best with i-1, i-3")
        assert len(asked(world, "gate")) == 9  # each one before each attempt


def test_a_quick_gate_leaves_out_the_gang(made):
    world = made(gang_of(lambda one, other: True), run="train.py", resources=Resources(nodes=2, gpu=("H200",)))
    with ThreadPoolExecutor(1) as pool:
        inspector = Inspector(services=world, bootstrapper=Prepared(), pool=pool)
        assert look(world, inspector, 1, "i-1", "i-2") == ()
    assert (len(asked(world, "gate")), asked(world, "gang")) == (2, [])


def test_the_doctor_examines_a_jobs_machines_with_the_package_that_it_ships(made):
    world = made(lambda n, argv, stdin: answer(XID) if n == 2 and argv[2] == "gate" else None)
    group = world.group.create("gpucloud-j")
    world.group.arm(group, datetime.now(timezone.utc).replace(year=2099))
    world.group.resize(group, 2, worlds.POOL)
    world.group.describe(group)  # they are pending at first
    first, second = examine(world, worlds.state(gpu="H200", group=group), full=False)
    assert (first.error, [gpu.name for gpu in first.checked.report.gpus]) == (None, ["NVIDIA H200"] * 4)
    assert [one.code for one in first.checked.findings if one.severity.value == "fail"] == []
    assert [one.code for one in second.checked.findings] == ["xid"]
    world.shell.unreachable.add(first.node.id)
    assert "connection refused" in examine(world, worlds.state(gpu="H200", group=group), full=False)[0].error
