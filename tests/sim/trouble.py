"""What goes wrong in a run while the storm lasts, and the calm after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpucloud.domain.node.node import EndCause, NodeState, Notice
from gpucloud.domain.offer import Pool
from tests.sim.cloud import POOLS

if TYPE_CHECKING:
    from tests.sim.loom import Process
    from tests.sim.machine import Machine
    from tests.sim.setting import Deadline
    from tests.sim.world import Run


class Trouble:
    """Draws every fault at its own rate."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._dice = run.dice
        self._loom = run.loom

    def begin(self) -> None:
        setting = self._run.setting
        kinds: tuple[tuple[float, Callable[[], None]], ...] = (
            (setting.notices, self._notice),
            (setting.deaths, self._death),
            (setting.freezes, self._freeze),
            (setting.hangs, self._hang),
            (setting.agents_lost, self._lose_agent),
            (setting.cuts, self._cut),
            (setting.offline, self._go_offline),
            (setting.kills, self._kill),
            (setting.pauses, self._pause),
            (setting.rivals, self._rival),
            (setting.shortages, self._shortage),
            (setting.outages, self._outage),
            (setting.all_at_once, self._all_at_once),
        )
        for rate, what in kinds:
            if rate > 0:
                self._again(rate, what)
        self._loom.at(setting.storm_s, self._calm)
        if setting.deadline is not None:
            for pool in POOLS:
                self._turn(pool, setting.deadline, up=self._dice.random() < 0.5)

    def _turn(self, pool: Pool, deadline: Deadline, *, up: bool) -> None:
        """A spot pool has machines for a while, or has none, and takes back those that it gave.

        Of a job that can go on with some of its nodes it takes about a half.
        """
        lasting = self._dice.expovariate(1 / (deadline.up_s if up else deadline.down_s))
        if not up:
            self._run.cloud.full_until[pool] = self._loom.now + lasting
            spares = self._run.setting.least_nodes > 0
            for node in self._run.cloud.alive:
                able = node.pool == pool and node.state is NodeState.RUNNING and node.ending is None
                if able and not (spares and self._dice.random() < 0.5):
                    give_notice(self._run, self._run.machines[node.id])
        self._loom.after(lasting, lambda: self._run.over or self._turn(pool, deadline, up=not up))

    def _again(self, rate: float, what: Callable[[], None]) -> None:
        def happen() -> None:
            if not self._run.calm and not self._run.over:
                what()
                self._again(rate, what)

        self._loom.after(self._dice.expovariate(rate), happen)

    def _calm(self) -> None:
        run = self._run
        run.calm = True
        run.setting.faults.refused = run.setting.faults.reply_lost = 0.0
        run.setting.weather.refused = run.setting.weather.reply_lost = run.setting.weather.stale_s = 0.0
        run.cloud.full_until.clear()
        run.store.down_until = 0.0
        for process in run.processes.values():
            process.online = True
        for machine in run.machines.values():
            machine.cut_from.clear()

    def _machine(self) -> Machine | None:
        able = [n.id for n in self._run.cloud.alive if n.state is NodeState.RUNNING and n.ending is None]
        return self._run.machines[self._dice.choice(able)] if able else None

    def _supervisor(self) -> Process | None:
        able = [process for process in self._run.processes.values() if process.alive]
        return self._dice.choice(able) if able else None

    def _notice(self) -> None:
        machine = self._machine()
        if machine is not None:
            give_notice(self._run, machine)

    def _death(self) -> None:
        machine = self._machine()
        if machine is not None:
            self._run.cloud.strike(machine.id, self._dice.choice((EndCause.CRASH, EndCause.INTERRUPTED)))

    def _all_at_once(self) -> None:
        for node in self._run.cloud.alive:
            self._run.cloud.strike(node.id, EndCause.INTERRUPTED)

    def _freeze(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.frozen = True
            if self._dice.random() < 0.5:
                self._loom.after(self._dice.uniform(1, 120), lambda: setattr(machine, "frozen", False))

    def _hang(self) -> None:
        for gang in self._run.gangs.values():
            gang.hung = gang.hung or gang.running

    def _lose_agent(self) -> None:
        machine = self._machine()
        if machine is not None:
            machine.lose_agent()

    def _cut(self) -> None:
        machine, process = self._machine(), self._supervisor()
        if machine is not None and process is not None:
            machine.cut_from.add(process.pid)
            self._loom.after(self._dice.uniform(1, 90), lambda: machine.cut_from.discard(process.pid))

    def _go_offline(self) -> None:
        process = self._supervisor()
        if process is not None:
            process.online = False
            self._loom.after(self._dice.uniform(1, 300), lambda: setattr(process, "online", True))

    def _kill(self) -> None:
        process = self._supervisor()
        if process is None:
            return
        if self._dice.random() < 0.5:
            process.kill()
        else:  # in the middle of a call that comes soon
            process.dies_at_call = process.calls + self._dice.randint(1, 12)

    def _pause(self) -> None:
        process = self._supervisor()
        if process is not None:
            process.pause(self._dice.uniform(1, 60))

    def _rival(self) -> None:
        self._run.supervise()

    def _shortage(self) -> None:
        group = self._run.cloud.group
        if group is not None and group.pool is not None:
            self._run.cloud.full_until[group.pool] = self._loom.now + self._dice.uniform(10, 400)

    def _outage(self) -> None:
        self._run.store.down_until = self._loom.now + self._dice.uniform(1, 60)


def give_notice(run: Run, machine: Machine) -> None:
    """The cloud says that it will take a machine; the machine hears it within two seconds."""
    run.cloud.give_notice(machine.id)
    interrupted_at = run.cloud.nodes[machine.id].interrupted_at
    if interrupted_at is not None:
        notice = Notice(action="terminate", at=interrupted_at)
        run.loom.after(run.dice.uniform(0, 2), lambda: setattr(machine, "notice", notice))
