"""Makes the machine what a job wants: look, decide, do, look again, until it is ready or nothing more can be done."""

from __future__ import annotations

import fcntl
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gpucloud import smi
from gpucloud.agent.machine.carrying import StepFailed, ask_apt, carry_out
from gpucloud.agent.machine.gather import gather
from gpucloud.agent.machine.notes import Notes
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.node.bootstrap.facts import REFUSED, Answer
from gpucloud.domain.node.bootstrap.steps import REBOOT_WANTED
from gpucloud.domain.node.machine.decide import next_step
from gpucloud.domain.node.machine.facts import (
    AptAnswer,
    Ask,
    MachineFact,
    MachineFacts,
    MachineStep,
    MachineWanted,
    Ready,
    Reboot,
    Stuck,
    digest,
)

_MOST_STEPS = 60  # far more than any way has: a loop that has no end is a fault of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How it ended: exactly one of `fact`, `reboot` (why) and `stuck`; `steps` with their seconds."""

    steps: tuple[tuple[str, float], ...]
    fact: MachineFact | None = None
    reboot: str = ""
    stuck: Stuck | None = None


class Machine(Protocol):
    """A machine that can be looked at and changed."""

    def look(self) -> MachineFacts:
        """Return its facts now."""
        ...

    def ask(self, packages: tuple[str, ...]) -> None:
        """Have apt's answer about the set among the facts, until something is changed."""
        ...

    def carry_out(self, step: MachineStep) -> None:
        """Change it. Raises StepFailed."""
        ...

    def unfetched(self, packages: tuple[str, ...]) -> None:
        """Have fresh lists read, and the set refused when its packages could not be fetched for the second time."""
        ...


def make(root: Path, wanted: MachineWanted) -> Made:
    """Make this machine; one at a time, each may be killed anywhere and repeated. Notes are kept below `root`.

    An emulated machine is only looked at: what lies below it is the machine of whoever runs it.
    """
    folder = root / "machine"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    notes = Notes(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        allowed = replace(wanted, install=False) if smi.are_stand_ins() else wanted
        made = made_on(ThisMachine(folder, notes, allowed), allowed)
        if made.fact is not None:
            notes.ready(replace(made.fact, digest=digest(wanted)))
        if made.reboot:
            notes.set_reboot(made.reboot)
    return made


def made_on(machine: Machine, wanted: MachineWanted) -> Made:
    """Return how it ended on that machine."""
    done: list[MachineStep] = []
    took: list[tuple[str, float]] = []
    for _ in range(_MOST_STEPS):
        decision = next_step(machine.look(), wanted)
        match decision:
            case Ready(versions=versions):
                return Made(steps=tuple(took), fact=MachineFact(digest=digest(wanted), versions=versions))
            case Stuck():
                return Made(steps=tuple(took), stuck=decision)
            case Reboot(why=why):
                return Made(steps=tuple(took), reboot=why)
            case Ask(sets=sets):
                for packages in sets:
                    machine.ask(packages)
            case MachineStep():
                if decision in done:
                    return Made(steps=tuple(took), stuck=_without_effect(decision))
                done.append(decision)
                started = time.monotonic()
                try:
                    machine.carry_out(decision)
                except StepFailed as error:
                    if error.unfetched and decision.packages:
                        machine.unfetched(decision.packages)
                        done = []  # with fresh lists the same step may do, and is no repetition
                        continue
                    return Made(steps=tuple(took), stuck=Stuck(what=str(error), hint="run the command again"))
                took.append((decision.name, round(time.monotonic() - started, 1)))
    return Made(steps=tuple(took), stuck=Stuck(what=f"no end after {_MOST_STEPS} steps", hint="report this"))


def _without_effect(step: MachineStep) -> Stuck:
    return Stuck(what=f"{step.name} changed nothing: {step.why}, still", hint="replace the machine, or do it by hand")


class ThisMachine:
    """The machine that this process runs on."""

    def __init__(self, folder: Path, notes: Notes, wanted: MachineWanted) -> None:
        self._folder = folder
        self._notes = notes
        self._wanted = wanted
        self._facts: MachineFacts | None = None
        self._asked: dict[tuple[str, ...], None] = {}
        self._tried: list[str] = []
        self._unfetched: list[tuple[str, ...]] = []

    def look(self) -> MachineFacts:
        """Return its facts now."""
        answers = self._facts.asked if self._facts else ()
        new = tuple(self._answer(packages) for packages in self._asked)
        self._asked.clear()
        self._facts = gather(self._wanted, self._notes, answers + new, tuple(self._tried))
        return self._facts

    def ask(self, packages: tuple[str, ...]) -> None:
        """Have apt's answer about the set among the facts, until something is changed."""
        self._asked[packages] = None

    def carry_out(self, step: MachineStep) -> None:
        """Change it. Raises StepFailed."""
        if step.installs:
            self._notes.set_installed()
        say(f"{step.name}: {step.why}")
        carry_out(step, self._folder, say=say)
        self._tried.append(step.name)
        if step.lists and self._facts is not None:
            self._notes.set_listed(self._facts.sources_digest)
        self._facts = None  # what apt answered may be otherwise now

    def unfetched(self, packages: tuple[str, ...]) -> None:
        """Have fresh lists read, and the set refused when its packages could not be fetched for the second time."""
        self._unfetched.append(packages)
        self._notes.set_listed("")
        self._facts = None

    def _answer(self, packages: tuple[str, ...]) -> AptAnswer:
        if self._unfetched.count(packages) > 1:
            return AptAnswer(packages=packages, installs=None, said=f"{packages[0]} is listed and cannot be fetched")
        return ask_apt(packages)


def say(line: str) -> None:
    """Tell whoever looks on."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# The node's `machine` command: its wish on standard input, its answer as one line, how it ended as the exit code.


def machine_command(root: Path) -> int:
    """Make this machine what the wish says and return 0; 101 when it must boot anew, 102 when nothing mends it."""
    made = make(root, from_json(MachineWanted, sys.stdin.read()))
    if made.stuck is not None:
        answer, code = Answer(said=made.stuck.what, hint=made.stuck.hint, steps=made.steps), REFUSED
    elif made.reboot:
        answer, code = Answer(said=made.reboot, steps=made.steps), REBOOT_WANTED
    else:
        answer, code = Answer(said="ready", steps=made.steps), 0
    sys.stdout.write(f"{to_json(answer)}\n")
    return code
