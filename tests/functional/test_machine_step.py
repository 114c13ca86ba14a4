"""The machine step over a host: refused, rebooted, done; the node's command itself on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.domain.job.spec import Cloud, Job, MachineChoices, Market, Resources
from gpucloud.domain.node.bootstrap.facts import Answer, Facts
from gpucloud.domain.node.bootstrap.wanted import with_driver
from gpucloud.domain.node.machine.facts import MachineFact, MachineWanted, digest
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.ports import Completed
from gpucloud.system.smi import parse
from gpucloud.usecases.services import Package
from gpucloud.usecases.supervise.bootstrap import bootstrap
from gpucloud.usecases.supervise.needs import wanted_for
from tests.standins.gpus import write_nvidia_smi

RECORDED = Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml"
PACKAGE = Package(data=b"zip", sha256="f00d")


class SteppedClock:
    """Time goes on only while somebody sleeps."""

    def __init__(self):
        self.time = datetime(2026, 11, 21, tzinfo=timezone.utc)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += timedelta(seconds=seconds)


class StandInHost:
    """A node with four recorded H200s, whose `machine` command answers as told; it boots within `boots_in` asks."""

    def __init__(self, *answers: tuple[int, Answer], boots_in: int | None = 3):
        pool = Pool(instance_type="p5en.48xlarge", zone="a", market=Market.SPOT)
        self.node = Node(
            id="n1", pool=pool, state=NodeState.RUNNING, launched_at=datetime(2026, 11, 21, tzinfo=timezone.utc),
            address="127.0.0.1", port=22, user="me", private_address="127.0.0.1", interface="lo",
        )  # fmt: skip
        self.answers = list(answers)
        self.boots_in = boots_in
        self.boot = 1
        self.down = 0
        self.wanted: list[MachineWanted] = []
        self.machine: MachineFact | None = None
        self.ran: list[str] = []

    def run(self, argv, *, stdin=b"", timeout_s=30.0):
        if self.down:
            self.down -= 1
            raise HostUnreachable("n1: connection refused")
        if argv[0] == "cat":
            return self.said(f"boot-{self.boot}\n")
        if "facts" in argv[2]:
            return self.said(to_json(self.facts()))
        if "reboot" in argv[2]:
            self.ran.append("reboot")
            if self.boots_in is None:
                return Completed(exit_code=1, stdout=b"", stderr=b"sudo: a password is required\n")
            self.boot, self.down, self.machine = self.boot + 1, self.boots_in, None
            raise HostUnreachable("n1: the connection was lost")
        self.ran.append(argv[2])
        if argv[2] == "machine":
            code, answer = self.answers.pop(0)
            wanted = json.loads(stdin)
            self.machine = MachineFact(digest=self.digest, versions=(("driver", "580.159.04"),)) if code == 0 else None
            self.version = wanted["version"]
            return Completed(exit_code=code, stdout=f"motd\n{to_json(answer)}\n".encode(), stderr=b"")
        return self.said("")

    def renew(self):
        self.ran.append("login")

    def said(self, text):
        return Completed(exit_code=0, stdout=text.encode(), stderr=b"")

    def facts(self):
        return Facts(
            python="/usr/bin/python3", version=(3, 12, 3), torch="2.13.0", torch_cuda="13.0",
            root="/home/me/.gpucloud", package="f00d",
            free_bytes=1 << 40, cpus=96, time=datetime(2026, 11, 21, tzinfo=timezone.utc), boot_id=f"boot-{self.boot}",
            gpus=parse(RECORDED.read_text()) if self.machine else (),
            gpu_fault=None if self.machine else "exit code 9: NVIDIA-SMI has failed",
            agent_package="f00d", agent_busy=False, layer=None, machine=self.machine,
        )  # fmt: skip


def fit(host, driver="580", story=lambda _: None, version=""):
    job = Job(
        name="j", run="train.py", budget_usd=Decimal(1), source=Path("/j.yaml"), code=Path("/"), cloud=Cloud.AWS,
        resources=Resources(gpus=4, gpu=("H200",)), machine=MachineChoices(driver=driver),
    )  # fmt: skip
    wanted = wanted_for(job, package=PACKAGE.sha256, code="/code", secrets={}, store_url="file:///s", power_off=())
    host.digest = digest(wanted.machine)
    return bootstrap(host, with_driver(wanted, version), PACKAGE, SteppedClock(), story=story)


def test_a_driver_that_is_installed_by_the_step_is_looked_for_only_after_it():
    host = StandInHost((0, Answer(said="ready", steps=(("driver", 61.0),))))
    told = []
    done = fit(host, version="580.159.04", story=told.append)
    assert told == ["n1: machine: driver took 61 s"]
    assert done.changed == ("machine",)
    assert done.lock["machine"] == {"driver": "580.159.04"}
    assert host.version == "580.159.04"
    assert fit(host).changed == ()
    assert host.ran == ["machine", "login"]


def test_a_reboot_is_told_waited_for_and_followed_by_the_same_command():
    host = StandInHost((101, Answer(said="the driver's module does not load")), (0, Answer(said="ready")))
    told = []
    done = fit(host, story=told.append)
    assert host.ran == ["machine", "reboot", "machine", "login"]
    assert told == ["n1 reboots (machine: the driver's module does not load); its paid time goes on"]
    assert host.boot == 2
    assert done.lock["machine"] == {"driver": "580.159.04"}
    assert dict(done.seconds)["reboot"] == 12.0  # three asks in vain and one answered, 3 s apart


def test_a_machine_that_asks_for_reboot_after_reboot_is_given_up():
    host = StandInHost(*[(101, Answer(said="again"))] * 3)
    with pytest.raises(NodeError, match="exit code 101"):
        fit(host)
    assert host.ran == ["machine", "reboot", "machine", "reboot", "machine"]


def test_a_machine_that_does_not_come_back_is_given_up_after_ten_minutes():
    host = StandInHost((101, Answer(said="x")), boots_in=10_000)
    with pytest.raises(NodeError, match="did not come back within 10 min of a reboot"):
        fit(host)


def test_a_machine_that_may_not_be_rebooted_is_named():
    host = StandInHost((101, Answer(said="x")), boots_in=None)
    with pytest.raises(NodeError, match="n1 does not reboot: sudo: a password is required"):
        fit(host)


def test_a_refusal_is_shown_with_its_hint():
    host = StandInHost((102, Answer(said="no NVIDIA GPU on this machine's PCI bus", hint="take machines with GPUs")))
    with pytest.raises(NodeError) as caught:
        fit(host)
    assert (caught.value.message, caught.value.hint) == (
        "n1: no NVIDIA GPU on this machine's PCI bus", "take machines with GPUs",
    )  # fmt: skip


@pytest.fixture
def node(tmp_path):
    """Return a function that runs the node's `machine` command on this machine, in a home of its own."""
    zip_path = tmp_path / "gpucloud.zip"
    zip_path.write_bytes(package_zip()[0])

    def run(wanted, programs=None, **said):
        env = {**os.environ, "HOME": str(tmp_path), **said}
        if programs:
            env["PATH"] = f"{programs}:{env['PATH']}"
        argv = [sys.executable, "-I", str(zip_path), "machine", "--root", str(tmp_path / "root")]
        return subprocess.run(argv, input=to_json(wanted), capture_output=True, text=True, env=env, timeout=60)

    return run


LOOK = MachineWanted(install=False, branch="", least_driver="450.80.02", gpus=4)


def test_a_machine_that_has_what_is_wanted_is_recognised_by_a_stand_in_nvidia_smi_and_written_down(node, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    smi = programs / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat {RECORDED}\n")
    smi.chmod(0o755)
    started = datetime.now(timezone.utc)
    done = node(LOOK, programs)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"said": "ready", "hint": "", "steps": []}), done.stderr
    assert datetime.now(timezone.utc) - started < timedelta(seconds=10)  # 0.3 s on an idle machine
    record = json.loads((tmp_path / "root" / "machine" / "ready.json").read_text())
    assert record["fact"]["digest"] == digest(LOOK)
    assert ["driver", "580.159.04"] in record["fact"]["versions"]


def test_on_an_emulated_machine_nothing_is_changed_whatever_the_job_wants(node, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sudo", "apt-get", "apt-mark", "dpkg", "sh", "install", "modprobe", "systemctl", "cloud-init"):
        program = programs / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/ran\nexit 1\n')
        program.chmod(0o755)
    wanted = replace(LOOK, install=True, branch="580", runtime="docker", apt_mirror="http://127.0.0.1:1/ubuntu")
    done = node(wanted, programs, GPUCLOUD_STAND_IN_GPUS="1")
    assert done.returncode == 102, done.stderr
    write_nvidia_smi(programs, name="NVIDIA T4", count=4, memory_mib=16000)
    ready = replace(wanted, runtime="")
    done = node(ready, programs, GPUCLOUD_STAND_IN_GPUS="1")
    assert (done.returncode, json.loads(done.stdout)["steps"]) == (0, []), done.stdout
    ran = (tmp_path / "ran").read_text().splitlines()
    assert set(ran) == {"systemctl is-active nvidia-fabricmanager"}  # a question
    record = json.loads((tmp_path / "root" / "machine" / "ready.json").read_text())
    assert record["fact"]["digest"] == digest(ready)


def test_what_is_missing_where_we_only_look_is_refused_by_name(node):
    done = node(LOOK)
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (102, "")
    assert answer["said"] in ("no NVIDIA GPU on this machine's PCI bus", "no NVIDIA driver: no `nvidia-smi`")
    assert answer["hint"]
