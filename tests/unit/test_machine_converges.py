"""A machine that is killed between any two commands, and in the middle of any, is finished by the next run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpucloud.agent.machine.making import made_on
from gpucloud.domain.node.hardware import Gpu
from gpucloud.domain.node.machine.facts import (
    AptAnswer,
    MachineFacts,
    MachineStep,
    MachineWanted,
    Package,
    PciDevice,
    Run,
)

KERNEL = "6.8.0-1055-aws"
WANTED = MachineWanted(install=True, branch="", least_driver="580.65.06", gpus=1)
GPU = Gpu(index=0, uuid="GPU-1", name="A10G", memory_mib=23028, driver="580.178.04")


class Killed(Exception):
    """SIGKILL."""


class StandInMachine:
    """Applies the commands to facts as apt, dpkg and modprobe would; killed at the `kill_at`-th moment.

    A command has two moments: before it, and in its middle.
    """

    def __init__(self, kill_at: int | None):
        self.kill_at = kill_at
        self.moment = 0
        self.commands: list[tuple[str, ...]] = []
        self.facts = MachineFacts(
            os="ubuntu", release="24.04", codename="noble", arch="x86_64", kernel=KERNEL, privilege="root",
            systemd=False, free_bytes=90 << 30, sources_digest="s1",
            pci=(PciDevice(vendor=0x10DE, device=0x2237, kind=0x0302),),
        )  # fmt: skip

    def restarted(self):
        """The process that remembers is gone."""
        self.facts = replace(self.facts, tried=(), asked=())

    def look(self):
        return self.facts

    def ask(self, packages):
        new = AptAnswer(packages=packages, installs=(("nvidia-utils-580-server", "580.178.04-0ubuntu0.24.04.1"),))
        self.facts = replace(self.facts, asked=(*self.facts.asked, new))

    def unfetched(self, packages):
        raise AssertionError("this archive has everything that it lists")

    def carry_out(self, step: MachineStep):
        if step.installs:
            self.facts = replace(self.facts, installed_by_us=True)
        for run in step.commands:
            self.survive()
            self.commands.append(run.argv)
            self.run(run)
        tried = (*self.facts.tried, step.name)
        listed = self.facts.sources_digest if step.lists else self.facts.listed
        self.facts = replace(self.facts, tried=tried, asked=(), listed=listed)

    def run(self, run: Run):
        words = set(run.argv)
        if "install" in words and "-f" not in words:
            names = [word for word in run.argv if word.startswith(("nvidia-", "linux-"))]
            self.put(names[:1], "installed")
            self.put(names[1:], "half-configured", interrupted=True)
            self.survive()
            self.put(names, "installed")
        elif "--configure" in words or "-f" in words:
            self.put([p.name for p in self.facts.packages], "installed")
        elif "hold" in words:
            packages = tuple(replace(p, held=p.held or p.name in words) for p in self.facts.packages)
            self.facts = replace(self.facts, packages=packages)
        elif run.argv == ("modprobe", "nvidia"):
            self.facts = replace(self.facts, loaded="580.178.04", gpus=(GPU,), gpu_fault=None)
        elif run.argv[0] == "nvidia-smi":
            self.facts = replace(self.facts, gpus=(replace(GPU, persistence=True),))
        else:
            assert "update" in words or run.argv[0] == "modprobe", run.argv

    def put(self, names, state, *, interrupted=False):
        kept = tuple(p for p in self.facts.packages if p.name not in names)
        new = tuple(Package(name=name, version="580.178.04-0", state=state) for name in names)
        self.facts = replace(
            self.facts,
            packages=tuple(replace(p, held=self.held(p.name)) for p in kept + new),
            dpkg_interrupted=interrupted,
            modules=((KERNEL, "580.178.04"),),
            gpus=self.facts.gpus or (),
            gpu_fault=None if self.facts.gpus else "exit code 9: NVIDIA-SMI has failed",
        )

    def held(self, name):
        return any(p.held for p in self.facts.packages if p.name == name)

    def survive(self):
        self.moment += 1
        if self.moment == self.kill_at:
            raise Killed


def test_a_bare_machine_is_made_in_this_order_and_a_second_run_does_nothing():
    machine = StandInMachine(None)
    made = made_on(machine, WANTED)
    assert [name for name, _ in made.steps] == ["lists", "driver", "hold", "module", "persistence"]
    assert dict(made.fact.versions) == {
        "os": "ubuntu 24.04", "kernel": KERNEL, "driver": "580.178.04", "installed": "gpucloud",
    }  # fmt: skip
    machine.restarted()
    before = len(machine.commands)
    assert made_on(machine, WANTED).steps == ()
    assert len(machine.commands) == before


@pytest.mark.parametrize("moment", range(1, 9))
def test_killed_at_any_moment_the_next_run_ends_with_the_same_machine(moment):
    whole = StandInMachine(None)
    made_on(whole, WANTED)
    assert whole.moment == 8
    machine = StandInMachine(moment)
    with pytest.raises(Killed):
        made_on(machine, WANTED)
    machine.restarted()
    assert made_on(machine, WANTED).fact is not None
    done = (machine.facts.packages, machine.facts.modules, machine.facts.gpus)
    assert done == (whole.facts.packages, whole.facts.modules, whole.facts.gpus)
    assert all(package.held for package in machine.facts.packages)
    headless = "nvidia-headless-no-dkms-580-server-open"
    assert len([argv for argv in machine.commands if headless in argv and "install" in argv]) == 1


def test_a_step_that_changes_nothing_is_not_tried_again():
    class Deaf(StandInMachine):
        def run(self, run):
            pass

    machine = Deaf(None)
    made = made_on(machine, WANTED)
    assert made.stuck.what == "driver changed nothing: no NVIDIA driver: no `nvidia-smi`, still"
    assert made.fact is None
