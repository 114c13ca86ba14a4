"""One machine: the product's agent over simulated time, and how a supervisor reaches it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucloud.agent.attempt.decide import OwnEnd
from gpucloud.agent.daemon import Agent
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.node import Node, Notice
from gpucloud.domain.node.status import AttemptStatus, Launch, Outcome, RunState, Status, status_to_json
from gpucloud.ports import Completed
from tests.sim.training import Part

if TYPE_CHECKING:
    from tests.sim.world import Run

_OWN_END = OwnEnd(argv=("poweroff",), after=timedelta(seconds=150))
_DONE = Completed(exit_code=0, stdout=b"", stderr=b"")


class Machine:
    """A node's processes: alive or not, frozen or not, cut off from these processes or not."""

    def __init__(self, run: Run, node_id: str) -> None:
        self.run = run
        self.id = node_id
        self.alive = True
        self.frozen = False
        self.cut_from: set[int] = set()
        self.notice: Notice | None = None
        self.newest = 0
        self.status: Status | None = None
        self.part: Part | None = None
        self.obeyed = 0
        self._root: Path = run.folder / node_id
        self._agent: SimulatedAgent | None = None

    def prepare(self) -> None:
        """The bootstrap's end: an agent runs."""
        if self._agent is None:
            (self._root / "agent").mkdir(parents=True, exist_ok=True)
            self._agent = SimulatedAgent(self, self._root)
            self._heartbeat(self._agent)

    def lose_agent(self) -> None:
        """The agent dies, and what it ran with it."""
        self._agent = None

    def command(self, desired: bytes) -> None:
        if self._agent is not None:
            (self._root / "agent" / "desired.json").write_bytes(desired)
            self.soon()

    def soon(self) -> None:
        self.run.loom.after(0.05, self.tick)

    def tick(self) -> None:
        if self._agent is not None and self.alive and not self.frozen:
            self._agent.tick()
            self.run.judge_obedience(self, self._agent.epoch_obeyed)

    def die(self) -> None:
        self.alive = False
        if self.part is not None:
            self.part.end(Outcome.KILLED)

    def power_off(self) -> None:
        self.run.power_off(self.id)

    def _heartbeat(self, agent: SimulatedAgent) -> None:
        if self.alive and self._agent is agent:
            self.tick()
            self.run.loom.after(self.run.setting.heartbeat_s, lambda: self._heartbeat(agent))


class SimulatedAgent(Agent):
    """The product's agent; the attempt that it runs, its metrics and its status file are simulated."""

    def __init__(self, machine: Machine, root: Path) -> None:
        self._machine = machine
        super().__init__(
            root,
            notice=lambda: machine.notice,
            own_end=_OWN_END,
            rest=lambda _: None,
            node_metrics=_Station(),  # type: ignore[arg-type]
        )
        self._outbox = _Outbox(machine)  # type: ignore[assignment]
        self._newest = machine.newest

    @property
    def epoch_obeyed(self) -> int:
        return self._inbox.desired.epoch if self._inbox.desired is not None else 0

    def _recover(self) -> AttemptStatus | None:
        part = self._machine.part
        if part is None:
            return None
        part.end(Outcome.KILLED)
        return replace(part.advance(frozenset()), state=RunState.EXITED)

    def _begin(self, launch: Launch) -> None:
        self._machine.newest = launch.attempt
        self._running = self._machine.part = self._machine.run.join(self._machine, launch)  # type: ignore[assignment]

    def _end_node(self) -> None:
        self._machine.power_off()


class _Station:
    gpus = ()
    unhealthy = None
    host = None
    spared: frozenset[int] = frozenset()

    def look(self, *_: Any) -> None:
        pass


class _Outbox:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._heartbeat = 0

    def publish(self, status: Status, *, now_s: float) -> None:
        self._heartbeat += 1
        self._machine.status = replace(status, heartbeat=self._heartbeat)


class AgentsTime:
    """Stands for `datetime` in the agent: machines keep the true time, as NTP does."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now

    def now(self, zone: timezone) -> datetime:
        return self._now()


class Reach:
    """Implements `Shell` for one process."""

    def __init__(self, run: Run, pid: int, dice: random.Random) -> None:
        self.run = run
        self.pid = pid
        self.dice = dice

    def host(self, node: Node) -> Host:
        return Host(self, node)

    def close(self) -> None:
        pass


class Host:
    """Implements `Host`: the few commands that the supervisor sends."""

    def __init__(self, reach: Reach, node: Node) -> None:
        self.node = node
        self._reach = reach

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        process = self._reach.run.processes[self._reach.pid]
        machine = self._reach.run.machines[self.node.id]
        process.call(self._reach.dice.uniform(0.005, 0.05))
        if not self._answers(machine):
            process.sleep(self._reach.dice.uniform(0.1, 3.0))
            raise HostUnreachable(f"{machine.id}: no answer", may_pass=True)
        answer = self._answer(machine, argv, stdin)
        process.call(self._reach.dice.uniform(0.005, 0.05))
        if not self._answers(machine):
            raise HostUnreachable(f"{machine.id}: connection lost", may_pass=True)
        return answer

    def sync(self, root: Path, target: str) -> str:
        self.run(("true",))
        return f"{target}/0"

    def close(self) -> None:
        pass

    def _answers(self, machine: Machine) -> bool:
        online = self._reach.run.processes[self._reach.pid].online
        return online and machine.alive and not machine.frozen and self._reach.pid not in machine.cut_from

    def _answer(self, machine: Machine, argv: tuple[str, ...], stdin: bytes) -> Completed:
        if argv[0] == "cat" and argv[1].endswith("status.json"):
            text = status_to_json(machine.status).encode() if machine.status is not None else b""
            return Completed(exit_code=0 if text else 1, stdout=text, stderr=b"")
        if argv[0] == "sh" and argv[-1].endswith("desired.json"):
            machine.command(stdin)
            return _DONE
        if argv[0].endswith("python"):
            return Completed(exit_code=0, stdout=f"32768 60999 {' '.join(argv[3:])}".encode(), stderr=b"")
        return _DONE
