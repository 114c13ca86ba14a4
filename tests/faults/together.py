"""Several runs of the command line at once over one set of fakes, interleaved call by call in simulated time.

Each is a process of its own to all who ask: its host, its signals, its output, its death. What one finds is what the
others left, at whatever call they are.
"""

from __future__ import annotations

import contextlib
import io
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any
from unittest import mock

import gpucloud.cli
from gpucloud.adapters.jobfile import read_job
from gpucloud.cli.interrupts import Interrupts
from gpucloud.domain.errors import GpucloudError, HostUnreachable, ProvisionError, StoreError
from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.node import Node
from gpucloud.ports import Brought
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise import prepare
from tests.fakes.agent import FakeFleet
from tests.fakes.fleet_shell import FleetHost, FleetShell
from tests.faults import rig
from tests.faults.process import quick, run_main
from tests.faults.rig import Outside, Rigged
from tests.sim.loom import Killed, Loom, Process
from tests.sim.threads import simulated

_CALL_S = (0.002, 0.08)
_LONG_CALL_S = 6.0
_LONG = ("provisioner.ensure", "provisioner.destroy")


class LoomClock:
    """Implements `Clock` over the loom; who is no process of it lets no time pass."""

    def __init__(self, loom: Loom) -> None:
        self._loom = loom

    def now(self) -> Any:
        return self._loom.time

    def sleep(self, seconds: float) -> None:
        if self._loom.current is not None:
            self._loom.sleep(seconds)


class AnyShell:
    """Implements `Shell` for every group of the cloud, each with machines and a training of its own."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self.fleets: dict[str, FakeFleet] = {}

    def host(self, node: Node) -> FleetHost:
        cloud = self._outside.cloud
        for group in cloud.names:
            if any(one.id == node.id for one in cloud.describe(group).nodes):
                return FleetShell(self.fleet(group), cloud, group).host(node)
        raise HostUnreachable(f"{node.id}: connection refused")

    def fleet(self, group: str) -> FakeFleet:
        """Return what the group's machines do."""
        outside = self._outside
        if group not in self.fleets:
            self.fleets[group] = FakeFleet(outside.clock, outside.cloud, outside.store, outside.training)
        return self.fleets[group]

    def close(self) -> None:
        """Nothing is open."""


class Shared(Outside):
    """What outlives all processes; every group of every run is in it. `most` machines of one run lived at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shell: Any = AnyShell(self)
        self.most = 0
        self.home.key(rig.JOB).parent.mkdir(parents=True, exist_ok=True)
        for run in (rig.JOB, f"{rig.JOB}-2", f"{rig.JOB}-3"):
            self.home.key(run).touch()  # the machines' own, which nothing here opens

    def live(self) -> None:
        """Let time pass on all machines."""
        for group, fleet in self.shell.fleets.items():
            if self.cloud.describe(group).exists:
                fleet.live(group)

    def look(self, call: str) -> None:
        """Note machines that are there, or asked for, with no shut-off ahead: at any moment, whoever does what."""
        self.looks += 1
        for group in self.cloud.names:
            view = self.cloud.describe(group)
            self.most = max(self.most, len(view.alive))
            if (view.alive or view.size) and (view.armed_until is None or view.armed_until <= self.clock.now()):
                self.breaches.append(f"{call}: {len(view.alive)} machines, {view.size} asked for, {view.armed_until}")


class _Outputs:
    """Implements `Outputs`; the connection breaks as often as the story says while they come home."""

    def __init__(self, together: Together, run: str) -> None:
        self._together, self._run = together, run

    def bring_home(self, *_: object) -> Brought:
        if self._together.breaks > 0:
            self._together.breaks -= 1
            self._together.broken += 1
            raise HostUnreachable("connection lost while outputs came home")
        home = self._together.outside.file.parent / "outputs" / self._run
        home.parent.mkdir(exist_ok=True)
        home.write_text("weights")
        self._together.brought.add(self._run)
        return Brought(paths=(str(home),))

    def note(self, *_: object) -> None:
        pass

    def came(self, *_: object) -> None:
        pass

    def bring_profile(self, *_: object) -> tuple[str, ...]:
        return ()


class _Composition(Rigged):
    """One process's composition: as the rig's, with outputs that may break on their way."""

    together: Together

    def services(self, job: Job, name: str, **named: Any) -> Services:
        return replace(super().services(job, name, **named), outputs=_Outputs(self.together, name))

    def bring_stored_home(self, job: Job, name: str) -> Brought:
        """Nothing is in the store: it is brought from the machines."""
        return Brought()


@dataclass(slots=True)
class Event:
    """Something that happens to a process at its n-th call, before it is made."""

    at: int
    name: str
    do: Callable[[Command], None]


@dataclass
class Command:
    """One run of `gpucloud`: how it goes on, and how it ended (`code` None: it has not)."""

    words: tuple[str, ...]
    process: Process
    out: io.TextIOWrapper = field(default_factory=lambda: io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True))
    err: io.StringIO = field(default_factory=io.StringIO)
    stdin: io.StringIO = field(default_factory=io.StringIO)
    terminal: bool = False
    events: list[Event] = field(default_factory=list)
    handlers: dict[int, Any] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    offline_until: float = 0.0
    calls: int = 0
    dead: int = 0
    code: int | None = None
    strand: Any = None
    cloud: Any = None
    look: Callable[[str], None] = lambda _: None

    def around(self, name: str, do: Callable[[], Any]) -> Any:
        """Make a call of this process: time passes on the way there and back, and anything may happen meanwhile."""
        loom = self.process.loom
        if self.dead or not self.process.alive:
            raise Killed
        self.calls += 1
        while self.events and self.calls >= self.events[0].at:
            event = self.events.pop(0)
            self.happened.append(f"{event.name} at call {self.calls} ({name})")
            event.do(self)
        self._obey()
        dice: random.Random = loom.dice  # type: ignore[attr-defined]
        takes = dice.uniform(0.2, _LONG_CALL_S) if name.startswith(_LONG) else dice.uniform(*_CALL_S)
        loom.sleep(takes / 2)
        if loom.now < self.offline_until:
            loom.sleep(min(5.0, self.offline_until - loom.now))
            self._obey()
            raise _unreachable(name)
        self.look(name)
        try:
            return do()
        finally:
            self.look(name)
            loom.sleep(takes / 2)
            self._obey()

    @property
    def said(self) -> str:
        """What it wrote to its standard output."""
        self.out.seek(0)
        return self.out.read()

    def send(self, number: int) -> None:
        """Signal the process: its first thread hears it at its next call."""
        self.pending.append(number)

    def die(self, code: int) -> None:
        """End the process without a word, from any of its threads."""
        self.dead = code
        self.process.loom.after(0, self.process.kill)
        self.process.loom.park(None)

    def _obey(self) -> None:
        if self.process.loom.current is not self.strand:
            return
        while self.pending:
            number = self.pending.pop(0)
            handler = self.handlers.get(number, signal.default_int_handler if number == signal.SIGINT else None)
            if handler is None or handler is signal.SIG_DFL:
                self.die(128 + number)
            handler(number, None)


def _unreachable(name: str) -> GpucloudError:
    if name.lstrip("!").startswith("store"):
        return StoreError("the network is down", may_pass=True)
    if name.lstrip("!").startswith(("shell", "host")):
        return HostUnreachable("the network is down")
    return ProvisionError("the network is down", may_pass=True)


class Together:
    """The processes of one story, over one outside."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.loom = Loom()
        self.dice = random.Random(seed)
        self.loom.dice = self.dice  # type: ignore[attr-defined]
        self.commands: list[Command] = []
        self.brought: set[str] = set()
        """The runs whose outputs are home."""
        self.breaks = self.broken = 0
        """How often the connection still breaks while outputs come home, and how often it did."""
        self._processes: dict[int, Process] = {}
        with mock.patch.object(rig, "JumpingClock", return_value=LoomClock(self.loom)):
            self.outside = Shared(folder)
        self.write_file()

    @property
    def script(self) -> Path:
        """The job's script."""
        return self.outside.file.parent / "code" / "train.py"

    def write_file(self, budget: str = "1 USD") -> None:
        """Write the job file, with outputs and that budget; its code is apart from the home that keeps copies of it."""
        self.script.parent.mkdir(exist_ok=True)
        self.script.touch()
        text = rig.JOB_FILE.replace("budget: 1 USD", f"budget: {budget}")
        self.outside.file.write_text(f"{text}code: code\noutputs: [results/]\n")
        self.outside.job = read_job(self.outside.file)

    def start(self, *words: str, host: str = "laptop", terminal: str | None = None) -> Command:
        """Start a command; `terminal` is what its user answers when he is asked, None without one."""
        process = Process(self.loom, " ".join(words), host=host)
        self._processes[process.pid] = process
        command = Command(words, process, stdin=io.StringIO(terminal or ""), terminal=terminal is not None)
        self.commands.append(command)
        command.cloud = _Composition(self.outside, command)  # type: ignore[arg-type]
        command.cloud.together = self
        command.look = self.outside.look
        command.strand = self.loom.spawn(process, lambda: self._run(command))
        return command

    def run(self, *, hours: float = 3.0) -> None:
        """Let all that was started end, within so much time."""
        self.loom.run(self.loom.now + hours * 3600)

    def await_end(self, *words: str) -> Command:
        """Run one command to its end."""
        command = self.start(*words)
        self.run()
        return command

    def pass_by(self, time: timedelta) -> None:
        """Let time pass with nobody there."""
        self.loom.now += time.total_seconds()
        self.outside.live()

    def _run(self, command: Command) -> None:
        try:
            command.code = run_main(self._arguments(command))
        except Killed:
            command.code = command.dead or 137
            raise
        finally:
            command.code = command.dead or (137 if command.code is None else command.code)
            self.loom.after(0, command.process.kill)  # the threads that it leaves behind go with it

    def _arguments(self, command: Command) -> tuple[str, ...]:
        file = self.outside.file
        return tuple(str(file) if word == file.name else word for word in command.words)

    def current(self) -> Command | None:
        """Return whose turn it is."""
        strand = self.loom.current
        return next((c for c in self.commands if strand is not None and c.process is strand.process), None)

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """While it lasts, `gpucloud` runs in this story."""
        modules = [import_module(module.name) for module in walk_packages(gpucloud.cli.__path__, "gpucloud.cli.")]
        with contextlib.ExitStack() as stack:
            for module in modules:
                if hasattr(module, "Gpucloud"):
                    stack.enter_context(mock.patch.object(module, "Gpucloud", self._composed))
            for name in ("stdout", "stderr", "stdin"):
                stack.enter_context(mock.patch.object(sys, name, _Stream(self, name, getattr(sys, name))))
            stack.enter_context(quick())
            stack.enter_context(mock.patch("signal.signal", self._signal))
            stack.enter_context(mock.patch.object(Interrupts, "_can_ask", lambda own: own._asks and self._terminal()))
            stack.enter_context(simulated(self.loom, self.dice, self._processes, prepare.bootstrap))
            try:
                yield
            finally:
                for process in self._processes.values():
                    process.kill()

    def _composed(self, *_: object, **__: object) -> Any:
        command = self.current()
        assert command is not None
        return command.cloud

    def _signal(self, number: int, handler: Any) -> Any:
        command = self.current()
        assert command is not None
        before = command.handlers.get(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        command.handlers[number] = handler
        return before

    def _terminal(self) -> bool:
        command = self.current()
        return command is not None and command.terminal


class _Stream:
    """A standard stream that is each process's own."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, together: Together, name: str, real: Any) -> None:
        self._together, self._name, self._real = together, {"stdout": "out", "stderr": "err"}.get(name, name), real

    def __getattr__(self, name: str) -> Any:
        command = self._together.current()
        return getattr(self._real if command is None else getattr(command, self._name), name)

    def isatty(self) -> bool:
        return False
