"""One run of the whole loop: supervisors, cloud, machines and their ranks, judged at every change."""

from __future__ import annotations

import math
import random
import traceback
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from unittest import mock

import gpucloud.agent.daemon
from gpucloud.adapters.markets.tables import TableMaker
from gpucloud.domain.checkpoint.manifest import Commit
from gpucloud.domain.errors import GpucloudError, HostUnreachable
from gpucloud.domain.job.spec import Job, Market, MarketPolicy, Resources
from gpucloud.domain.market.learned import Lesson, Tables
from gpucloud.domain.money.ledger import total
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.node.status import Launch
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.ports import Brought
from gpucloud.ports import Host as HostPort
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.services import Package, Services
from gpucloud.usecases.supervise.bootstrap import Bootstrapped
from gpucloud.usecases.supervise.session import Session
from tests.sim.cloud import CAP, Cloud, CloudLine, Prices
from tests.sim.invoice import invoice
from tests.sim.loom import EPOCH, Loom, Process
from tests.sim.machine import AgentsTime, Machine, Reach
from tests.sim.setting import Setting
from tests.sim.store import Store, StoreLine
from tests.sim.threads import simulated
from tests.sim.training import Gang, Part
from tests.sim.trouble import Trouble

_LATE_END = timedelta(seconds=140)  # the shut-off fires up to 120 s late, and machines take seconds to end


@dataclass(slots=True)
class Verdict:
    """How a run ended; `wrong` says each breach in words, and is empty where all is well."""

    wrong: list[str] = field(default_factory=list)
    reason: ExitReason | None = None
    spent_usd: Decimal = Decimal(0)
    budget_usd: Decimal = Decimal(0)
    seconds: float = 0.0
    supervisors: int = 0
    machines: int = 0
    attempts: int = 0
    commits: int = 0
    left_with_notice: int = 0
    lost_with_notice: int = 0
    killed: int = 0
    lost_beyond_interval: int = 0
    unsaved_at_the_end: int = 0
    calls_until_up: int = 0
    on_demand: int = 0
    moved: int = 0
    on_a_part: int = 0
    grown: int = 0


class Run:
    """Everything of one run."""

    def __init__(self, seed: int, setting: Setting, folder: Path) -> None:
        self.dice = random.Random(seed)
        self.setting = setting
        self.folder = folder
        self.loom = Loom()
        self.store = Store(self.loom)
        due = setting.deadline
        every_s, on_demand = setting.price_s, due is not None
        self.prices = Prices(self.loom, seed, at_cap=setting.at_cap, every_s=every_s, on_demand=on_demand)
        self.cloud = Cloud(self.loom, self.dice, self.prices, setting.weather)
        self.machines: dict[str, Machine] = {}
        self.processes: dict[int, Process] = {}
        self.gangs: dict[int, Gang] = {}
        self.verdict = Verdict(budget_usd=setting.budget_usd)
        self.refunded_late = Decimal(0)
        self.committed: Commit | None = None
        self.calm = False
        self.over = False
        self.tale: list[str] = []
        spot_alone = MarketPolicy.SPOT if due is None else MarketPolicy.AUTO
        market = Resources(market=spot_alone, nodes=setting.nodes, least_nodes=setting.least_nodes)
        self.job = Job(
            name="job",
            run="python train.py",
            budget_usd=setting.budget_usd,
            source=folder,
            code=folder,
            resources=market,
        )
        if due is not None:
            work = timedelta(seconds=due.work_s) if due.work_s is not None else None
            self.job = replace(self.job, deadline=timedelta(seconds=due.span_s), policy=due.policy, work=work)

    def run(self) -> Verdict:
        """Let it happen, and return the verdict."""
        first = self.prices.offers(None)[0]
        state = JobState(
            job="job",
            pool=first.pool,
            cap_usd_per_hour=CAP,
            lease_s=self.setting.lease_s,
        )
        jobs = JobStore(self.store, "job")
        Orders(jobs=jobs, clock=_Epoch()).first(self._order())
        jobs.create(state)
        self.cloud.started = lambda record: self.machines.update({record.id: Machine(self, record.id)})
        self.cloud.died = self._died
        self.cloud.changed = self._judge_money
        agents_time = mock.patch.object(gpucloud.agent.daemon, "datetime", AgentsTime(lambda: self.loom.time))
        with agents_time, simulated(self.loom, self.dice, self.processes, self._bootstrap):
            self.attend()
            Trouble(self).begin()
            self.loom.watch = self._stop_when_over
            self.loom.run(self.setting.bound_s)
            for process in self.processes.values():
                process.kill()
        self._judge_end()
        return self.verdict

    def blame(self, what: str) -> None:
        """Write down a breach, with its time."""
        line = f"at {self.loom.now:.1f} s: {what}"
        if line not in self.verdict.wrong and len(self.verdict.wrong) < 20:
            self.verdict.wrong.append(line)

    def state(self) -> JobState:
        loaded = JobStore(self.store, "job").load()
        assert loaded is not None
        return loaded[0]

    def attend(self) -> None:
        """The user, or a schedule: sees to it that somebody supervises the job until it is torn down."""
        if self.over:
            return
        if not any(process.alive for process in self.processes.values()):
            self.supervise()
        self.loom.after(5.0 if self.calm else self.dice.uniform(5, 90), self.attend)

    def supervise(self) -> Process:
        """Start a supervisor, on a host of its own."""
        skew = self.dice.uniform(-1, 1) * self.setting.skew_s
        number = len(self.processes) + 1
        process = Process(self.loom, f"supervisor {number}", host=f"host{number}", skew_s=skew)
        self.processes[process.pid] = process
        self.verdict.supervisors += 1
        self.loom.spawn(process, lambda: self._supervise(process))
        return process

    def join(self, machine: Machine, launch: Launch) -> Part:
        """A machine starts its part of an attempt."""
        gang = self.gangs.get(launch.attempt)
        if gang is None:
            size = len(self.state().attempts[launch.attempt - 1].members)
            script = self.setting.script.on(size, self.setting.nodes)
            gang = Gang(self.loom, self.dice, launch.attempt, size, script, self.store)
            gang.begun, gang.committed = self._begun, self._committed
            self.gangs[launch.attempt] = gang
            self.verdict.calls_until_up = self.verdict.calls_until_up or self.cloud.calls
        part = Part(gang, machine, int(dict(launch.env).get("GPUCLOUD_RANKS", "0").split()[0]))
        gang.join(part)
        others = [g.number for g in self.gangs.values() if g is not gang and g.running]
        if others:
            self.blame(f"attempt {launch.attempt} began on {machine.id} while ranks of attempt {others[0]} ran")
        return part

    def power_off(self, node_id: str) -> None:
        """A machine ends itself."""
        self.cloud.strike(node_id, EndCause.CHOICE)

    def judge_obedience(self, machine: Machine, epoch: int) -> None:
        """What a machine goes by may never become older."""
        if epoch < machine.obeyed:
            self.blame(f"{machine.id} obeyed epoch {epoch} after {machine.obeyed}")
        machine.obeyed = epoch

    def _supervise(self, process: Process) -> None:
        try:
            world, watcher = self._world(process), _Onlooker(self, process)
            Session(services=world, orders=Orders(jobs=world.jobs, clock=process), watcher=watcher).run()
            self.over = self.over or self.state().torn_down
        except GpucloudError as error:
            self.tale.append(f"{self.loom.now:8.1f} {process.name} ends: {error}")
        except Exception:  # noqa: BLE001  a bug of ours, whatever it is
            self.blame(f"{process.name}: {traceback.format_exc()}")
        process.loom.after(0, process.kill)

    def _order(self) -> Order:
        return Order(
            number=1,
            store=self.store.url,
            job="job",
            base="job",
            run=1,
            by="me@here",
            at=EPOCH,
            first_at=EPOCH,
            host="here",
            resolved=self.job,
            spec_sha256="0" * 64,
            file_budget_usd=self.setting.budget_usd,
            budget_usd=self.setting.budget_usd,
            deadline_at=EPOCH + self.job.deadline if self.job.deadline is not None else None,
        )

    def _world(self, process: Process) -> Services:
        line = CloudLine(self.cloud, process)
        return Services(
            job=self.job,
            name="job",
            clock=process,
            store=StoreLine(self.store, process, self.dice, self.setting.faults),
            provisioner=line,
            group=line,
            market=self.prices,
            shell=Reach(self, process.pid, self.dice),
            outputs=_NoOutputs(),
            public_key="",
            package=Package(data=b"", sha256="0" * 64),
            rules=self.setting.rules,
            period_s=self.setting.period_s,
            flush_s=60.0,
            key=b"key",
            make_tables=_tables,
        )

    def _bootstrap(self, host: HostPort, *arguments: object, **named: object) -> Bootstrapped:
        process = self.loom.process
        for _ in range(3):
            process.sleep(self.dice.uniform(*self.setting.bootstrap_s) / 3)
            host.run(("true",))
        machine = self.machines[host.node.id]
        if not machine.alive:
            raise HostUnreachable(f"{machine.id}: gone")
        machine.prepare()
        return Bootstrapped(
            python="/usr/bin/python",
            base_python="/usr/bin/python",
            package_path="/lib/gpucloud.zip",
            root="/home/me/.gpucloud",
            findings=(),
            changed=(),
            seconds=(),
            lock={"machine": None},
        )

    def _died(self, node_id: str) -> None:
        self.machines[node_id].die()
        if self.state().exit_reason is not None:
            self.refunded_late += self.cloud.refunds[node_id]
        if self.cloud.spent() > self.setting.budget_usd:
            self.blame(f"{self.cloud.spent()} USD are spent of {self.setting.budget_usd}")

    def _begun(self, gang: Gang) -> None:
        before = max((g for g in self.gangs.values() if g.number < gang.number), key=lambda g: g.number, default=None)
        if before is not None and before.restored is not None:
            self._count_lost(before, before.step - gang.step)
        if self.committed is not None and gang.step < self.committed.step:
            self.blame(f"attempt {gang.number} goes on from step {gang.step}; {self.committed.step} was committed")

    def _count_lost(self, before: Gang, lost: int) -> None:
        script = self.setting.script
        if before.left:
            self.verdict.left_with_notice += 1
            self.verdict.lost_with_notice += lost
        else:  # one interval, and what was trained while its save was on its way
            self.verdict.killed += 1
            self.verdict.lost_beyond_interval += lost > script.every + math.ceil(script.save_s / script.step_s)

    def _committed(self, commit: Commit) -> None:
        self.verdict.commits += 1
        if self.committed is None or commit.step > self.committed.step:
            self.committed = commit

    def _judge_money(self) -> None:
        group, alive, now = self.cloud.group, self.cloud.alive, self.loom.time
        if not alive:
            return
        if group is None or group.armed_until is None:
            self.blame(f"{len(alive)} machines live, and no shut-off is armed")
            return
        if now > group.armed_until + _LATE_END:
            self.blame(f"{len(alive)} machines live {now - group.armed_until} after the shut-off")
        lasting = [node for node in alive if node.ending is None]
        hours = Decimal(max(0.0, (group.armed_until - now).total_seconds())) / 3600
        promised = self.cloud.spent() + CAP * len(lasting) * hours
        if promised > self.setting.budget_usd:
            self.blame(f"{len(lasting)} machines are paid until more than the budget: {promised:.4f} USD")
        counted = [node for node in lasting if not node.relieved]
        wanted = self.setting.nodes * (2 if self.setting.deadline is not None else 1)  # some may stand beside
        if len(counted) > wanted:
            self.blame(f"{len(counted)} machines are counted, {wanted} are wanted")
        unasked = [node.id for node in lasting if node.relieved and node.interrupted_at is None]
        if unasked:
            self.blame(f"{unasked[0]} lives, is not counted, and nobody takes it")

    def _stop_when_over(self) -> None:
        if self.over and not self.cloud.alive:
            self.setting.bound_s = self.loom.now
            self.loom.clear()

    def _judge_end(self) -> None:
        state, verdict = self.state(), self.verdict
        verdict.reason, verdict.seconds = state.exit_reason, self.loom.now
        verdict.machines, verdict.attempts = len(self.machines), len(state.attempts)
        verdict.spent_usd = self.cloud.spent()
        verdict.on_demand = sum(node.pool.market is Market.ON_DEMAND for node in self.cloud.nodes.values())
        verdict.on_a_part = sum(len(attempt.members) < self.setting.nodes for attempt in state.attempts)
        verdict.grown = sum(attempt.reason is ExitReason.RESIZED for attempt in state.attempts)
        verdict.moved = sum(attempt.reason is ExitReason.RESCHEDULED for attempt in state.attempts)
        newest = max(self.gangs.values(), key=lambda gang: gang.number, default=None)
        if newest is not None and newest.restored is not None:
            verdict.unsaved_at_the_end = newest.step - (self.committed.step if self.committed else 0)
        if not state.torn_down:
            self.blame(f"it never ended: {state.status.value}, {len(self.cloud.alive)} machines live")
        if self.cloud.alive or self.cloud.group is not None:
            self.blame(f"{len(self.cloud.alive)} machines live, group: {self.cloud.group is not None}")
        if verdict.spent_usd > verdict.budget_usd:
            self.blame(f"{verdict.spent_usd} USD are spent of {verdict.budget_usd}")
        _judge_books(self, state)
        _judge_reason(self, state)


class _Epoch:
    """The clock of whoever gave the order, before all else."""

    def now(self) -> datetime:
        return EPOCH

    def sleep(self, seconds: float) -> None:
        """Nobody waits."""


def _tables(lesson: Lesson) -> Tables:
    return TableMaker().tables(lesson.task, lesson.zones, lesson.gpus, lesson.spot_usd_per_hour)


def _judge_books(run: Run, state: JobState) -> None:
    if not state.torn_down:
        return
    charges = JobStore(run.store, "job").charges()
    missing = sorted(set(run.machines) - {charge.node_id for charge in charges})
    if missing:
        run.blame(f"{missing[0]} is in no bill")
    for node in run.cloud.nodes.values():
        told = total(charge for charge in charges if charge.node_id == node.id)
        prices = run.prices.prices(node.pool, node.launched_at, node.ended_at or node.launched_at)
        if node.ended_at is not None and told != (due := invoice(node, prices)):
            run.blame(f"the ledger says {told} USD for {node.id}, the cloud charges {due}")


def _judge_reason(run: Run, state: JobState) -> None:
    reason, done = state.exit_reason, run.committed.step if run.committed else 0
    left = run.setting.budget_usd - run.cloud.spent() - run.refunded_late  # nobody knew of it then
    minute = CAP * run.setting.nodes / 60
    if reason is ExitReason.SUCCEEDED and done < run.setting.script.steps:
        run.blame(f"succeeded with {done} of {run.setting.script.steps} steps committed")
    elif reason is ExitReason.BUDGET and left > 8 * minute:
        run.blame(f"ended for its budget with {left / minute:.1f} min of it left")
    elif reason is ExitReason.NO_CAPACITY and run.loom.now < run.setting.rules.limits.patience.total_seconds():
        run.blame(f"no capacity before its patience was over: {state.message}")
    elif reason is ExitReason.LOST and (step := _newly_committed(run)) is not None:
        run.blame(f"given up though step {step} was newly committed by one of the last attempts: {state.message}")
    elif reason in (ExitReason.USER_ERROR, ExitReason.STOPPED, ExitReason.IDLE, ExitReason.DEADLINE):
        run.blame(f"ended with {reason.value}: {state.message}")


def _newly_committed(run: Run) -> int | None:
    """Return a step that one of the newest attempts committed and that none before them had made; None without one."""
    gangs = sorted(run.gangs.values(), key=lambda gang: gang.number)
    count = run.setting.rules.limits.fruitless_attempts
    best = max((gang.step for gang in gangs[:-count]), default=0)
    newest = max((gang.committed_step or 0 for gang in gangs[-count:]), default=0)
    return newest if newest > best else None


class _Onlooker:
    """Implements `Watcher`: what every supervisor tells, for whoever looks for the cause of a breach."""

    def __init__(self, run: Run, process: Process) -> None:
        self._run = run
        self._process = process

    def story(self, line: str) -> None:
        self._run.tale.append(f"{self._run.loom.now:8.1f} {self._process.name}: {line}")

    def tick(self, *_: object) -> None:
        pass

    def output(self, *_: object) -> None:
        pass


class _NoOutputs:
    def bring_home(self, *_: object) -> Brought:
        return Brought()

    def note(self, *_: object) -> None:
        pass

    def came(self, *_: object) -> None:
        pass

    def bring_profile(self, *_: object) -> tuple[str, ...]:
        return ()
