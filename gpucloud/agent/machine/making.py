"""Makes the machine what a job wants: look, decide, carry out, look again, until it is ready or can be no more."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gpucloud.agent.facts import Notes
from gpucloud.agent.machine.gather import ask, environment, gather
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.node.bootstrap.facts import REFUSED, Answer
from gpucloud.domain.node.bootstrap.steps import REBOOT_WANTED
from gpucloud.domain.node.machine.decide import next_step
from gpucloud.domain.node.machine.facts import (
    AptAnswer,
    Ask,
    Download,
    MachineFact,
    MachineFacts,
    MachineStep,
    MachineWanted,
    Ready,
    Reboot,
    Run,
    Stuck,
    digest,
)
from gpucloud.domain.node.machine.packages import simulate, simulated
from gpucloud.system import smi
from gpucloud.system.processes import locked
from gpucloud.system.retries import Retry
from gpucloud.system.wholefile import read_tail, write_whole

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
    with locked(folder / "lock"):
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


# Carries out a step: fetches its files, runs its commands as root, waits for the locks of others.


# apt waits for dpkg's lock by itself, and neither for that of its lists nor does dpkg wait at all.
_LOCKED = re.compile(r"Could not get lock|lock was locked by another process|is another process using it")
_UNFETCHED = re.compile(r"^E: (Failed|Unable) to fetch", re.MULTILINE)
_APT_LOCK = Retry(first_s=1.0, factor=1.0, within_s=900.0)
_COMMAND_LIMIT_S = 3000.0
_FETCH_LIMIT_S = 60.0
_SHOWN_LINES = 15


class StepFailed(Exception):
    """A step's command failed, or a file could not be fetched; the message ends with what it said.

    `unfetched`: an archive that lists a package does not have it.
    """

    unfetched = False


def carry_out(step: MachineStep, folder: Path, *, say: Callable[[str], None]) -> None:
    """Carry out the step, its log in `folder`. Raises StepFailed."""
    for download in step.downloads:
        _fetch(download, folder)
    for run in step.commands:
        _run(step.name, run, folder, say)


def ask_apt(packages: tuple[str, ...]) -> AptAnswer:
    """Return what apt would install for the set, or why it would not."""
    code, said = ask(*simulate(packages), timeout_s=120.0)
    if code == 0:
        return AptAnswer(packages=packages, installs=simulated(said))
    reason = [line for line in said.splitlines() if line.startswith("E: ") or "Depends: " in line]
    return AptAnswer(packages=packages, installs=None, said="; ".join(" ".join(line.split()) for line in reason)[:400])


def _fetch(download: Download, folder: Path) -> None:
    path = folder / download.name
    try:
        with urllib.request.urlopen(download.url, timeout=_FETCH_LIMIT_S) as response:  # noqa: S310  (https, ours)
            data: bytes = response.read()
        if download.fingerprint:
            data = _checked(data, download)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise StepFailed(f"{download.url}: {reason}") from error
    write_whole(path, data, mode=0o644)


def _checked(data: bytes, download: Download) -> bytes:
    key = binary(data)
    found = fingerprint(key)
    if found != download.fingerprint:
        raise ValueError(f"the key's fingerprint is {found}, not {download.fingerprint}")
    return key


def _run(name: str, run: Run, folder: Path, say: Callable[[str], None]) -> None:
    argv = [word.replace("{folder}", str(folder)) for word in run.argv]
    if not run.plain and os.geteuid() != 0:
        argv = ["sudo", "-n", *argv]
    log = folder / "machine.log"
    tries = _APT_LOCK.begin()
    while True:
        start = log.stat().st_size if log.exists() else 0
        code = _logged(argv, run.text, log)
        said = read_tail(log, 16384) if log.stat().st_size - start > 16384 else _since(log, start)
        if code in run.passes:
            return
        if locked := _LOCKED.search(said):
            say("another program holds apt's lock: waiting")
        if not locked or not tries.again():
            tail = "\n".join(said.splitlines()[-_SHOWN_LINES:])
            failed = StepFailed(f"{name}: `{' '.join(argv)}` ended with exit code {code}:\n{tail}\n(all of it: {log})")
            failed.unfetched = _UNFETCHED.search(said) is not None
            raise failed


def _logged(argv: list[str], text: str, log: Path) -> int:
    with log.open("ab") as file:
        file.write(f"$ {' '.join(argv)}\n".encode())
        file.flush()
        try:
            done = subprocess.run(
                argv,
                input=text.encode(),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
                timeout=_COMMAND_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124
        except OSError as error:
            file.write(f"{error}\n".encode())
            return 127
    return done.returncode


def _since(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace")


# The fingerprint of an OpenPGP key, so that a key from the network can be told from any other.


_ARMOR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----.*?\r?\n\r?\n(.*?)\r?\n(?:=[\w+/]{4}\r?\n)?-----END", re.DOTALL
)
_PUBLIC_KEY = 6


def binary(key: bytes) -> bytes:
    """Return the key without its armor; one that has none as it is. ValueError for an armor that is torn."""
    if not key.lstrip().startswith(b"-----BEGIN"):
        return key
    found = _ARMOR.search(key.lstrip())
    if found is None:
        raise ValueError("not an OpenPGP public key")
    return base64.b64decode(found[1])


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of the first key in binary form, version 4: RFC 4880, sections 4.2 and 12.2."""
    body = _first_packet(key)
    if body[0] != 4:
        raise ValueError(f"an OpenPGP key of version {body[0]}")
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()


def _first_packet(key: bytes) -> bytes:
    if len(key) < 6 or not key[0] & 0x80:
        raise ValueError("not an OpenPGP public key")
    if key[0] & 0x40:  # new format
        tag, length, start = key[0] & 0x3F, *_new_length(key)
    else:
        size = 1 << (key[0] & 3)
        tag, length, start = (key[0] >> 2) & 0xF, int.from_bytes(key[1 : 1 + size], "big"), 1 + size
    body = key[start : start + length]
    if tag != _PUBLIC_KEY or len(body) != length or not body:
        raise ValueError("not an OpenPGP public key")
    return body


def _new_length(key: bytes) -> tuple[int, int]:
    if key[1] < 192:
        return key[1], 2
    if key[1] < 224:
        return ((key[1] - 192) << 8) + key[2] + 192, 3
    return int.from_bytes(key[2:6], "big"), 6
