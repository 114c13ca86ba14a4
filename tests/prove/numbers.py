"""The numbers are right: the catalog, bills, trainings, what more time, money and zones change, and one figure for all.

`plan` and `simulate` replay one job; the meter bills each replayed machine as the emulated AWS's rules do, which are
written down a second time in `tests.sim.invoice`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.local.records import NodeRecord
from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.adapters.markets.tables import TableMaker
from gpucloud.domain.checkpoint.protection import NEVER, Saving
from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.job.quantities import parse_count
from gpucloud.domain.job.spec import (
    USUAL_MFU_PERCENT,
    CheckpointDirectory,
    CheckpointPolicy,
    Job,
    Market,
    MarketPolicy,
    Model,
    Policy,
    Resources,
    Strategy,
)
from gpucloud.domain.market.catalog import Machine
from gpucloud.domain.market.feasibility import refuse_what_cannot_be_kept
from gpucloud.domain.market.outcome import ON_DEMAND
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.policy import decide, least_span_s, least_task_budget_usd
from gpucloud.domain.market.recordings import Timeline, timeline, zone_set
from gpucloud.domain.market.scenario import USUAL, Recovery, Scenario, recovery_of, starts
from gpucloud.domain.market.simulation import Decide, Run, bill_usd, charges, replay, zone_sets
from gpucloud.domain.market.sizing import memory, saved_bytes, training_time
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.money.ledger import ChargeKind, total
from gpucloud.domain.node.gate.models import sheet_of
from gpucloud.domain.node.node import NodeState
from gpucloud.domain.offer import Offer, Pool, rank
from gpucloud.usecases.money.simulate import Outlooks, Stage, Study, simulate
from tests.fakes.market import NOW
from tests.prove.goal import Figure, Form, Goal
from tests.sim.invoice import invoice
from tests.unit.test_invoices import STORIES, Story, worked_out

_DATA = Path(__file__).parents[1] / "data"
_MOST_APART = 5.0  # percent between what plan and simulate say of one job: other windows of the same recording
_JOBS = {Form.SHORT: 500, Form.LONG: 5000}
_REPLAYED = {Form.SHORT: 500, Form.LONG: 5000}
_BILLED = {Form.SHORT: 4, Form.LONG: 60}
_LEARNED = {Form.SHORT: 8, Form.LONG: 60}
_HOUR_S = 3600.0
_MARKETS = PackagedMarkets()
_UNIFORM = partial(decide, Policy.UNIFORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How many numbers of a kind were tried, and what is wrong with which of them."""

    tried: int
    wrong: Sequence[str]
    worst: float = 0.0


def run(form: Form) -> Iterator[Figure]:
    """Count the numbers that are wrong, and say how many of each kind were tried."""
    wrong = 0
    kinds: dict[str, tuple[Callable[[], Found], int]] = {
        "catalog": (catalog, 550),
        "invoices": (invoices, 40),
        "trainings": (trainings, 12),
        "memory": (memories, 8),
        "limits": (partial(limits, _JOBS[form]), 500),
        **{
            f"monotone.{saving.value}": (partial(monotone, saving, _REPLAYED[form]), _REPLAYED[form])
            for saving in (Saving.RESUME, Saving.DIRECTORY, Saving.NONE)
        },
        "least-deadline": (partial(least_deadline, _LEARNED[form]), _LEARNED[form]),
        "plan-is-simulate": (plan_is_simulate, 8),
        "simulate-is-bill": (partial(simulate_is_bill, _BILLED[form]), _BILLED[form]),
    }
    for name, (judge, least) in kinds.items():
        found = judge()
        wrong += len(found.wrong)
        for line in found.wrong:
            sys.stderr.write(f"numbers: {name}: {line}\n")
        yield Figure(name=f"numbers.{name}", value=found.tried, limit=least, least=True)
        if name == "plan-is-simulate":
            yield Figure(name="numbers.plan-to-simulate-percent", value=round(found.worst, 2), limit=_MOST_APART)
    yield Figure(name="numbers", value=wrong, limit=0)


# The catalog, against a second source


def catalog() -> Found:
    """Compare each field of each type that the second source has; prices, zones and parts of a GPU have none."""
    second = json.loads((_DATA / "instance_types.json").read_text(encoding="utf-8"))
    machines, tried, wrong = load().machines, 0, []
    for name, told in second["types"].items():
        expected = _fields_told(told)
        ours = _fields_of(machines[name])
        for field in expected.keys() - set(second["disputed"].get(name, ())):
            tried += 1
            if ours[field] != expected[field]:
                wrong.append(f"{name}: {field} {ours[field]}, and {expected[field]} elsewhere")
        lowest, highest = told["gpu_mib"] // 1024, -(-told["gpu_mib"] * 2**20 // 10**9)
        if not lowest <= machines[name].vram_gib <= highest:
            wrong.append(f"{name}: {machines[name].vram_gib} GB of memory, and {told['gpu_mib']} MiB elsewhere")
    wrong += [f"{name}: nobody else knows it" for name in _unknown(machines, second["types"])]
    return Found(tried=tried, wrong=wrong)


def _fields_told(told: dict[str, Any]) -> dict[str, object]:
    return {
        "gpu": told["gpu"],
        "gpus": told["gpus"],
        "vcpus": told["vcpus"],
        "memory": told["memory_mib"] / 1024,
        "disks": told["nvme_gb"],
        "network": told["network_mbps"] / 1000,
        "efa": told["efa"],
        "cards": told["cards"],
        "architecture": {"amd64": "x86_64"}.get(told["arch"], told["arch"]),
    }


def _fields_of(machine: Machine) -> dict[str, object]:
    called = {"RTX PRO 6000": "rtx-pro-server-6000"}
    return {
        "gpu": called.get(machine.gpu, machine.gpu.lower().replace(" ", "-")),
        "gpus": machine.gpus,
        "vcpus": machine.vcpus,
        "memory": machine.memory_gib,
        "disks": machine.nvme_gb,
        "network": machine.network_gbps,
        "efa": machine.efa,
        "cards": machine.cards,
        "architecture": machine.architecture,
    }


def _unknown(machines: Any, second: Any) -> list[str]:
    """P3 machines are offered in no region any more, and no list of today has them."""
    return [name for name in machines if name not in second and not name.startswith("p3.")]


# Bills and trainings


def invoices() -> Found:
    """Bill each story of `tests/data/invoices.yaml`, whose sums were worked out by hand."""
    wrong = []
    for told in STORIES:
        billed = list(Story(told).charges())
        by_hand = {"compute": told["compute"]}
        by_hand |= {"disk": told.get("disk_usd", "0 = 0"), "address": told.get("address_usd", "0 = 0")}
        for kind, sums in by_hand.items():
            usd = total(charge for charge in billed if charge.kind is ChargeKind(kind))
            if usd != worked_out(sums):
                wrong.append(f"{told['story']}: {usd} for {kind}, and {sums} by hand")
    return Found(tried=len(STORIES), wrong=wrong)


def trainings() -> Found:
    """Plan each training of `tests/data/trainings.yaml`; where no MFU was published, with the default."""
    wrong, worst = [], 0.0
    told = yaml.safe_load((_DATA / "trainings.yaml").read_text(encoding="utf-8"))
    a100 = sheet_of("A100")
    assert a100 is not None
    for one in told:
        model = Model(params=parse_count(one["params"]), mfu_percent=one.get("mfu", USUAL_MFU_PERCENT), recompute=True)
        span = training_time(model, parse_count(one["tokens"]), gpus=1, tflops=a100.tflops["bf16"])
        apart = 100 * (span / timedelta(hours=1) / one["gpu_hours"] - 1)
        worst = max(worst, abs(apart))
        if abs(apart) > one["within"]:
            wrong.append(f"{one['training']}: {apart:+.1f} % of {one['gpu_hours']} GPU hours")
    return Found(tried=len(told), wrong=wrong, worst=worst)


def memories() -> Found:
    """Compare with what is published of memory, and with GPUs on which trainings are known to have run."""
    fsdp = {"strategy": Strategy.FSDP}
    exact = {
        "7.5B whole, 120 GB (ZeRO, figure 1)": (memory(Model(params=7_500_000_000), 64).states, 120e9, 1),
        "7.5B over 64, 1.9 GB (ZeRO, figure 1)": (memory(Model(params=7_500_000_000, **fsdp), 64).states, 1.9e9, 2),
        "1.5B, 24 GB (ZeRO, 3.1)": (memory(Model(params=1_500_000_000), 1).states, 24e9, 1),
        "BLOOM's checkpoint, 2.3 TB (BigScience)": (saved_bytes(Model(params=176_200_000_000)), 2.3e12, 15),
    }
    mpt = Model(params=6_650_000_000, seq=2048, hidden=4096, layers=32, vocab=50_432, **fsdp)
    llama = Model(params=69_000_000_000, seq=4096, hidden=8192, layers=80, vocab=32_000, recompute=True, **fsdp)
    gpt_2 = Model(params=124_000_000, seq=1024, batch=12, hidden=768, layers=12, vocab=50_304)
    fits = {
        "MPT-7B on 440 A100 of 40 GB": memory(mpt, 440).fits(40),
        "Llama 2 70B on A100 of 80 GB": memory(llama, 2000).fits(80),
        "GPT-2 124M at 12 × 1024 on 8 A100 of 40 GB (nanoGPT)": memory(gpt_2, 8).fits(40),
        "7B whole on no 80 GB": not memory(Model(params=7_000_000_000), 8).fits(80),
    }
    wrong = [name for name, (ours, told, within) in exact.items() if abs(ours / told - 1) * 100 > within]
    wrong += [name for name, holds in fits.items() if not holds]
    return Found(tried=len(exact) + len(fits), wrong=wrong)


# What more time, money and zones change


def limits(jobs: int) -> Found:
    """Refuse no job at the very edge of what can be kept, and each that is a second or a cent below it."""
    draw, wrong = random.Random(1), []
    for number in range(jobs):
        job, offers, changeover = _drawn(draw)
        edge = job.work + 2 * changeover if job.work is not None else timedelta(0)
        asked = replace(job, deadline=edge)
        if _refused(asked, offers, changeover) is not None:
            wrong.append(f"job {number} is refused at its least deadline")
        early = _refused(replace(job, deadline=edge - timedelta(seconds=1)), offers, changeover)
        if early is None or not early.startswith("deadline: "):
            wrong.append(f"job {number} is not refused a second before it")
        least = _least_budget(replace(asked, budget_usd=Decimal("0.01")), offers, changeover)
        if _refused(replace(asked, budget_usd=least), offers, changeover) is not None:
            wrong.append(f"job {number} is refused at its least budget")
        if _refused(replace(asked, budget_usd=least - Decimal("0.01")), offers, changeover) is None:
            wrong.append(f"job {number} is not refused a cent below it")
        later = _least_budget(replace(asked, deadline=2 * edge, budget_usd=Decimal("0.01")), offers, changeover)
        if later > least:
            wrong.append(f"job {number} needs more money with more time")
    return Found(tried=jobs, wrong=wrong)


def _drawn(draw: random.Random) -> tuple[Job, tuple[Offer, ...], timedelta]:
    work = timedelta(seconds=draw.choice([1, 60, 180, draw.randint(1, 3 * 86400)]))
    changeover = timedelta(seconds=draw.choice([60, 720, draw.randint(60, 2700)]))
    usd = Decimal(draw.randint(10, 10_000)) / 100
    share = Decimal(draw.randint(20, 85)) / 100  # dearer spot machines are not taken first
    resources = Resources(nodes=draw.randint(1, 8), market=MarketPolicy.AUTO)
    job = Job(
        name="drawn",
        run="train.py",
        budget_usd=Decimal(10**8),
        source=Path("drawn.yaml"),
        code=Path(),
        resources=resources,
        work=work,
    )
    offers = tuple(
        Offer(
            pool=Pool(instance_type="g5.xlarge", zone="us-east-1a", market=market),
            usd_per_hour=price,
            cap_usd_per_hour=usd,
            as_of=NOW,
            gpus=1,
        )
        for market, price in ((Market.ON_DEMAND, usd), (Market.SPOT, usd * share))
    )
    return job, rank(offers, resources), changeover


def _refused(job: Job, offers: tuple[Offer, ...], changeover: timedelta) -> str | None:
    """Return the hint, as who plans asks: what pays for no start is refused by the plan itself."""
    try:
        refuse_what_cannot_be_kept(job, offers, changeover, PrepaidRule())
        make_plan(job, offers, NOW, PrepaidRule())
    except PlanRefused as error:
        return error.hint
    return None


def _least_budget(job: Job, offers: tuple[Offer, ...], changeover: timedelta) -> Decimal:
    """Return the sum that the hint names: the job with a cent is refused for its budget."""
    hint = _refused(job, offers, changeover) or ""
    return Decimal(hint.split()[1]) if hint.startswith("budget: ") else Decimal("0.01")


def monotone(saving: Saving, jobs: int) -> Found:
    """Replay drawn jobs whose script saves so: dearer prices cost as much more, and the rest less on average.

    More time, money and zones are compared by the sums over all jobs: one job may be lucky where it had less of them.
    All are in time, at the very least deadline too, and no bill passes a budget.
    """
    draw, wrong = random.Random(2), []
    by_time, by_zones, by_budget = [0.0] * 3, [0.0] * 4, [0.0] * 3
    for number in range(jobs):
        task = _task(draw, saving)
        at = [draw.randrange(15_000) for _ in range(2)]
        edge_s = least_span_s(task)
        for place, span_s in enumerate((edge_s, 1.25 * edge_s, 2 * edge_s)):
            runs = [_replayed(replace(task, span_s=span_s), 2, start, saving=saving) for start in at]
            if any(run.finished_s is None or run.finished_s > span_s for run in runs):
                wrong.append(f"job {number} is late with {span_s / edge_s:g} times its least deadline")
            by_time[place] += sum(run.usd for run in runs) / task.on_demand_usd_per_hour
        relaxed = replace(task, span_s=1.25 * edge_s)
        for zones in range(1, 5):
            by_zones[zones - 1] += sum(_replayed(relaxed, zones, start, saving=saving).usd for start in at)
        least = least_task_budget_usd(relaxed, 0.4)
        for place, budget in enumerate((least, 1.5 * least, 4 * least)):
            paid = [_replayed(relaxed, 2, start, saving=saving, budget_usd=budget).usd for start in at]
            by_budget[place] += sum(paid)
            if max(paid) > budget * 1.0001:
                wrong.append(f"job {number} costs {max(paid)} with a budget of {budget}")
        once, twice = (_replayed(relaxed, 2, at[0], times, saving=saving).usd for times in (1, 2))
        if abs(twice - 2 * once) > 1e-6 * once:
            wrong.append(f"job {number} costs {twice / once} times as much at twice the price")
    for what, sums in (("time", by_time), ("zones", by_zones), ("money", by_budget)):
        wrong += [f"more {what} costs more: {sums}"] if sums != sorted(sums, reverse=True) else []
    return Found(tried=jobs, wrong=wrong)


def least_deadline(jobs: int) -> Found:
    """Replay drawn jobs at the least deadline that can be kept: learned costs no more than 1.02 of uniform."""
    draw, usd = random.Random(5), dict.fromkeys((Policy.UNIFORM, Policy.LEARNED), 0.0)
    for _ in range(jobs):
        task = _task(draw)
        task = replace(task, span_s=task.work_s + 2 * task.changeover_s)
        handover_s = _recovery(task, Saving.RESUME).handover_s
        tables = TableMaker().tables(replace(task, handover_s=handover_s), 2, 1, 0.4)
        for start in (draw.randrange(15_000) for _ in range(6)):
            for policy in usd:
                usd[policy] += _replayed(task, 2, start, policy=partial(decide, policy, tables=tables)).usd
    dear = usd[Policy.LEARNED] > 1.02 * usd[Policy.UNIFORM]
    return Found(tried=jobs, wrong=[f"learned costs {usd[Policy.LEARNED] / usd[Policy.UNIFORM]:.3f}"] if dear else [])


def _task(draw: random.Random, saving: Saving = Saving.RESUME) -> Task:
    changeover_s = 60.0 * draw.randint(4, 20) + (480.0 if saving is Saving.DIRECTORY else 0.0)
    work_s = float(draw.choice([180, draw.randint(1, 8) * 3600, draw.randint(600, 28_800)]))
    return Task(work_s=work_s, span_s=0.0, changeover_s=changeover_s, on_demand_usd_per_hour=1.0, tick_s=180.0)


def _recovery(task: Task, saving: Saving) -> Recovery:
    """Return what the task's changeover is for a script that saves so."""
    directory = CheckpointDirectory(path="out") if saving is Saving.DIRECTORY else None
    usual = recovery_of(timedelta(0), saving, CheckpointPolicy(directory=directory))
    restart = timedelta(seconds=task.changeover_s - usual.changeover_s)
    return recovery_of(restart, saving, CheckpointPolicy(directory=directory))


def _replayed(
    task: Task,
    zones: int,
    start: int,
    times: int = 1,
    *,
    policy: Decide = _UNIFORM,
    saving: Saving = Saving.RESUME,
    budget_usd: float | None = None,
) -> Run:
    recovery = _recovery(task, saving)
    told = replace(
        task,
        on_demand_usd_per_hour=float(times),
        handover_s=recovery.handover_s,
        saves_nothing=saving in NEVER,
    )
    return replay(policy, told, _line(zones, times), start, recovery, budget_usd)


@cache
def _line(zones: int, times: int) -> Timeline:
    market = _MARKETS.market("p3.2xlarge-2023-02").at_prices(Decimal(times), Decimal(times) * Decimal("0.4"))
    return timeline(market, zone_set(market, "us-east-1")[:zones], 1)


# One figure for all


def plan_is_simulate() -> Found:
    """Ask both of one job, on one GPU and on eight, in two zones and in four: the same but for the windows.

    Also on spot machines alone, which the deadline may end.
    """
    wrong, worst, tried = [], 0.0, 0
    outlooks = Outlooks(markets=_MARKETS, tables=TableMaker())
    spot, on_demand = Decimal("0.4"), Decimal(1)
    asked = ((1, 2), (1, 4), (8, 1), (8, 2))
    for market, (gpus, zones) in ((one, place) for one in (MarketPolicy.AUTO, MarketPolicy.SPOT) for place in asked):
        changeover = timedelta(minutes=12)
        scenario = Scenario(
            work=timedelta(hours=24),
            deadline=timedelta(hours=30),
            budget_usd=Decimal(1000),
            nodes=1,
            recovery=USUAL,
            market=market,
        )
        task = Task(
            work_s=24 * _HOUR_S,
            span_s=30 * _HOUR_S,
            changeover_s=changeover.total_seconds(),
            on_demand_usd_per_hour=float(on_demand),
        )
        stage = Stage(
            gpus=gpus,
            zones=zones,
            spot_usd_per_hour=spot,
            on_demand_usd_per_hour=on_demand,
            fallback=market is MarketPolicy.AUTO,
        )
        planned = outlooks.outlook(Policy.UNIFORM, task, stage, budget_usd=Decimal(1000))
        assert planned is not None
        means = []
        for recorded in outlooks.recordings(gpus):
            priced = recorded.at_prices(on_demand, spot)
            for sets in zone_sets(priced, zones):
                study = Study(
                    zone_sets=sets, policies=(Policy.UNIFORM,), deadlines=(scenario.deadline,), windows=100, seed=3
                )
                found = [float(one.summary.mean_usd) for one in simulate(scenario, priced, study, TableMaker)]
                means.append(sum(found) / len(found))
        simulated = sum(means) / len(means)
        apart = 100 * abs(float(planned.mean_usd) / simulated - 1)
        tried, worst = tried + 1, max(worst, apart)
        if apart > _MOST_APART:
            wrong.append(f"{gpus} GPUs in {zones} zones: plan {planned.mean_usd}, simulate {simulated:.2f}")
    return Found(tried=tried, wrong=wrong, worst=worst)


def simulate_is_bill(runs: int) -> Found:
    """Bill each machine of replayed jobs second by second by the rules that the emulated AWS goes by."""
    market = _MARKETS.market("p3.2xlarge-2023-02")
    observation = timeline(market, market.zones, 1)
    task = Task(work_s=10 * _HOUR_S, span_s=13 * _HOUR_S, changeover_s=720.0, on_demand_usd_per_hour=3.06, tick_s=180.0)
    wrong = []
    for start in starts(market, timedelta(hours=13), runs, seed=4):
        done = replay(partial(decide, Policy.UNIFORM), task, observation, start, Recovery(restart_s=600.0))
        again = sum((Decimal(life_usd) for life_usd in _invoiced(done, observation)), Decimal(0))
        if abs(again - bill_usd(done, observation)) > Decimal("1e-6"):
            wrong.append(f"window {start}: {bill_usd(done, observation)}, and {again} second by second")
        if abs(float(again) - done.usd) > 0.001 * done.usd:
            wrong.append(f"window {start}: policies were told {done.usd}, and {again} was billed")
    return Found(tried=runs, wrong=wrong)


def _invoiced(done: Run, observation: Timeline) -> Iterator[Decimal]:
    for lifetime, (nodes, billed) in zip(done.lifetimes, charges(done, observation), strict=True):
        prices = observation.prices[lifetime.zone]
        if lifetime.zone == ON_DEMAND:
            prices = (replace(prices[0], usd_per_hour=observation.market.on_demand_usd_per_hour),)
        pool = billed[0].pool
        assert pool is not None
        node = NodeRecord(
            id=billed[0].node_id,
            number=1,
            pool=pool,
            address="",
            port=0,
            user="",
            interface="",
            host_key="",
            state=NodeState.TERMINATED,
            launched_at=observation.when(lifetime.launched_s),
            ended_at=observation.when(lifetime.ended_s),
            ending=lifetime.cause,
        )
        yield nodes * invoice(node, prices)


GOAL = Goal(
    promise="every field of the catalog that a second source has is the same there (network of three types is disputed;"
    " prices, zones, bursts, parts of a GPU and the advisor have no second source); bills are those worked out by"
    " hand; eight published trainings take the GPU hours and the memory that were published, within stated bounds;"
    " 500 drawn jobs are refused exactly below what can be kept; more time, money and zones never cost more, and a"
    " price as much as it is; plan and simulate say the same of one job, and the bill of each replayed machine is that"
    " of a meter written down a second time",
    real="the catalog, the sizing, the meter, feasibility, policies, replays, plan's and simulate's use cases",
    simulated="jobs are drawn, markets are recordings; nothing was asked of AWS",
    run=run,
)
