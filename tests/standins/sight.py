"""Machines as a supervisor sees them when they die, freeze or are out of reach: views over simulated time.

What decides is real: `decide`, the books and `PeerReports`; machines, SSH, the cloud's list and the clock are played.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.node import NodeState, PeerReport
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import CloseAttempt, EndAttempt, NoteInterruptions
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Limits, Rules
from gpucloud.usecases.supervise.look import PeerReports
from tests.unit.worlds import NOW, opened, part, snapshot, state, up

LIMITS = Limits(alone=timedelta(seconds=60))
BELIEVED_S = 5.0  # from a machine's death to its being believed
_KNOCK_S = 2.0
_TICK_S = 0.25
_LONG_S = 45.0  # how long a machine that lives is out of our reach: longer than belief, shorter than patience

DEADLY = ("frozen", "off", "taken")
HARMLESS = ("none", "line", "ssh", "offline")


@dataclass
class Case:
    """One run: `fault` befalls machine `victim` (or all) at `at`; `reports`: ranks tell of steps of `step_s` each."""

    seed: int
    nodes: int = 2
    fault: str = "none"
    victim: int = 0
    at: float = 5.0
    step_s: float = 0.3
    reports: bool = True

    @classmethod
    def drawn(cls, seed: int) -> Case:
        dice = random.Random(seed)
        nodes = dice.randint(2, 5)
        return cls(
            seed=seed,
            nodes=nodes,
            fault=dice.choice(DEADLY + HARMLESS),
            victim=dice.randrange(nodes),
            at=dice.uniform(2, 8),
            step_s=dice.choice((0.1, 0.5, 2.0, 10.0)),
            reports=dice.random() < 0.8,
        )


@dataclass
class Sight:
    """The world of a case at `now` seconds."""

    case: Case
    now: float = 0.0
    step: int = 0
    state: object = None
    killed: bool = False
    believed: dict[str, float] = field(default_factory=dict)
    _answered: dict[str, float] = field(default_factory=dict)
    _probes: list[tuple[float, Future, PeerReport]] = field(default_factory=list)

    def __post_init__(self):
        self.ids = tuple(f"n{i}" for i in range(self.case.nodes))
        self.state = state(attempts=(opened(*self.ids),))
        self._answered = dict.fromkeys(self.ids, 0.0)
        made = SimpleNamespace(base_python="python3", package_path="/g.zip", root="/r")
        world = SimpleNamespace(shell=self, rules=Rules(limits=LIMITS))
        self._peer_reports = PeerReports(
            services=world, bootstrapper=SimpleNamespace(made_of=lambda _: made), pool=self
        )

    def run(self) -> None:
        """Go on until the attempt is ordered to end, or long enough to have believed what is wrong."""
        while self.now < self.case.at + _LONG_S and not self.killed:
            self.now += _TICK_S
            self._train()
            self._deliver()
            self._tick()

    def submit(self, work, peer, made, node):
        """As a thread pool does: a knock takes its time."""
        victim = int(node.id[1:])
        alive = not self._dead(victim) and self.case.fault != "ssh" if victim == self.case.victim else True
        away = not self._reached(int(peer.id[1:]))
        word = PeerReport.NOTHING if away else PeerReport.ALIVE if alive else PeerReport.DEAD
        future = Future()
        self._probes.append((self.now + (0.2 if word is PeerReport.ALIVE else _KNOCK_S + 0.2), future, word))
        return future

    def host(self, node):
        raise HostUnreachable(node.id)  # knocks are played by `submit`

    def _dead(self, machine: int) -> bool:
        return self.now >= self.case.at and self.case.fault in DEADLY and machine == self.case.victim

    def _reached(self, machine: int) -> bool:
        if self.now < self.case.at or self.case.fault == "none":
            return True
        return self.case.fault != "offline" and machine != self.case.victim

    def _train(self) -> None:
        if not any(self._dead(machine) for machine in range(self.case.nodes)):
            self.step = int(self.now / self.case.step_s)

    def _deliver(self) -> None:
        due = [one for one in self._probes if one[0] <= self.now]
        self._probes = [one for one in self._probes if one[0] > self.now]
        for _, future, word in due:
            future.set_result(word)

    def _tick(self) -> None:
        nodes = tuple(self._view(i) for i in range(self.case.nodes))
        world = snapshot(*nodes, group_size=self.case.nodes, state=self.state)
        world = self._peer_reports.hear(replace(world, now=NOW + timedelta(seconds=self.now)))
        self.state = transitions.record(world)
        goal = Goal(nodes=self.case.nodes, budget_usd=Decimal(1))
        action = decide(goal, replace(world, state=self.state), Rules(limits=LIMITS))
        if isinstance(action, NoteInterruptions):
            self.state = transitions.note_interruptions(self.state, action)
            self.believed.update({i.node_id: self.now - self.case.at for i in action.interruptions})
        self.killed = isinstance(action, EndAttempt | CloseAttempt)

    def _view(self, machine: int):
        name = self.ids[machine]
        if self._dead(machine) and self.case.fault == "taken" and self.now >= self.case.at + 1.0:
            return up(name, state=NodeState.TERMINATED)
        if self._reached(machine):
            self._answered[name] = self.now
        silence = self.now - self._answered[name]
        reported = max(0, self.step) if self.case.reports and machine == 0 and not silence else None
        self._last = reported if reported is not None else getattr(self, "_last", 0)
        told = self._last if self.case.reports and machine == 0 else None
        return up(name, part(1, step=told, step_seconds=self.case.step_s), silent=silence)


def wrong(case: Case) -> str | None:
    """Return what went wrong in a case, in one line; None when all was as it must be."""
    sight = Sight(case)
    sight.run()
    victim = f"n{case.victim}"
    others = [name for name in sight.believed if name != victim]
    if others:
        return f"{others} were given up"
    if case.fault in DEADLY and sight.believed.get(victim, 1e9) > BELIEVED_S:
        return f"its death was believed after {sight.believed.get(victim)} s"
    # A machine whose SSH alone is down is beyond help, unless the steps show that it works.
    vouched = case.fault != "ssh" or (case.reports and case.victim != 0 and case.step_s <= 0.5)
    if case.fault in HARMLESS and vouched and (sight.believed or sight.killed):
        return f"it lives and was given up after {sight.believed} s"
    return None
