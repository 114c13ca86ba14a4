"""Machines: `doctor` examines them, `gc` finds those of no job, `local` has the embedded fleet interrupt its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any

from gpucloud.cli.render.words import error_fields, say, say_json, table, tell, usd
from gpucloud.cli.target import group_of, known_job, none_is_up, one_node
from gpucloud.domain import codec
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job.quantities import format_moment, format_span, format_usd, parse_span
from gpucloud.domain.job.spec import AwsChoices, Cloud, Resources
from gpucloud.domain.money.ledger import ZERO
from gpucloud.domain.node.gate.report import REFUSED, Checked, Report, Severity, failures, figures
from gpucloud.domain.node.hardware import Gpu
from gpucloud.domain.supervision.strays import Thing
from gpucloud.domain.untrusted import in_one_line, set_off
from gpucloud.ports import Census
from gpucloud.usecases.machines import Examined, Sweeper, Swept, examine, require_embedded
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.found import Unasked, look_here, sweepers, swept_clouds
from gpucloud.wiring.jobs import access_to, asker_of

if TYPE_CHECKING:
    from gpucloud.adapters.local.group import LocalNodeGroup


def doctor(target: str | None, *, full: bool, as_json: bool) -> int:
    """Say how machines are; return 0, or 14 when one is not fit, or not known to be."""
    return _job(target, full=full, as_json=as_json) if target is not None else _here(full=full, as_json=as_json)


def _here(*, full: bool, as_json: bool) -> int:
    looked = look_here(Gpucloud(), full=full)
    checked, fit = looked.checked, is_fit(looked.checked) and not looked.barred
    if as_json:
        machine = {"checks": [{"name": c.name, "ok": c.ok, "text": c.text, "hint": c.hint} for c in looked.checks]}
        say_json({"machine": machine, **checked_json(checked), "fit": fit})
    else:
        words = {True: "ok", False: "wrong", None: "-"}
        rows = [(c.name, words[c.ok], c.text if c.ok or not c.hint else f"{c.text}: {c.hint}") for c in looked.checks]
        say(
            "this machine\n"
            + table([("check", "", "found"), *rows])
            + "\n\n"
            + checked_text(checked, barred=bool(looked.barred))
        )
        if not full and checked.report.gpus:
            tell("compute, memory and NVLink were not tried: gpucloud doctor --full")
    return 0 if fit else REFUSED


def _job(target: str | None, *, full: bool, as_json: bool) -> int:
    cloud = Gpucloud()
    known = known_job(cloud, target)
    state = asker_of(cloud, known).state()
    access_to(cloud, known).require_key(state)
    services = cloud.services(cloud.ordered(known).newest(), known.name, goes_on=False)
    try:
        found = examine(services, state, full=full)
    finally:
        services.shell.close()
    if not any(one.is_up for one in found):
        raise none_is_up(known.name, len(found))
    fit = _are_fit(found)
    if as_json:
        say_json({"job": known.name, "nodes": [_node_json(one) for one in found], "fit": fit})
    else:
        say("\n\n".join(_node_text(one) for one in found))
        if not full and any(one.checked is not None and one.checked.report.gpus for one in found):
            tell(f"compute, memory and NVLink were not tried: gpucloud doctor {known.name} --full")
    return 0 if fit else REFUSED


def _are_fit(found: Sequence[Examined]) -> bool | None:
    """Return whether the job's machines are fit; None while nothing is wrong and some are still being started."""
    if not all(one.checked is not None and is_fit(one.checked) for one in found if one.is_up):
        return False
    return True if all(one.is_up for one in found) else None


def _node_json(one: Examined) -> dict[str, Any]:
    checked = checked_json(one.checked) if one.checked is not None else {"gpus": [], "findings": [], "figures": {}}
    return {"id": one.node.id, "error": one.error, "busy": one.busy, **checked}


def _node_text(one: Examined) -> str:
    head = f"{one.node.id} ({', '.join(filter(None, (one.node.pool.instance_type, one.node.address)))})"
    if one.checked is None:
        return f"{head}\nnot examined: {set_off(one.error or '')}"
    busy = "\na job uses it now: it was not put to work" if one.busy else ""
    return f"{head}{busy}\n{checked_text(one.checked)}"


# A checked machine as text for people, or as an object.


_WORTH_TELLING_S = 0.1


def is_fit(checked: Checked) -> bool:
    """Whether nothing keeps the machine out."""
    return not failures(checked.findings)


def checked_json(checked: Checked) -> dict[str, Any]:
    """Return GPUs, findings and figures as an object; as `doctor --json` has them."""
    return {
        "gpus": codec.plain(checked.report.gpus or ()),
        "findings": codec.plain(checked.findings),
        "figures": dict(figures(checked.report)),
        "torch": codec.plain(checked.report.torch),
    }


def checked_text(checked: Checked, *, barred: bool = False) -> str:
    """Return a table of GPUs, what was measured, and every finding with what to do; `barred` by something else."""
    report = checked.report
    parts = [_gpus(report.gpus) if report.gpus else _no_gpu(report)]
    measured = [f"{name} {figure}" for name, figure in figures(report) if name != "took"]
    if measured:
        parts.append(in_one_line("measured: " + ", ".join(measured)))
    words = {Severity.FAIL: "FAILED", Severity.WARN: "warning"}
    parts += [in_one_line(f"{words[one.severity]}: {one}; {one.hint}") for one in checked.findings]
    took = f", after {report.seconds:.1f} s" if report.seconds >= _WORTH_TELLING_S else ""
    return "\n".join([*parts, f"{'fit' if is_fit(checked) and not barred else 'not fit'}{took}"])


def _no_gpu(report: Report) -> str:
    """Say why no GPU is shown; what is wrong with that stands among the findings."""
    if report.gpu_fault is not None:
        return "no NVIDIA GPU is known here: nvidia-smi fails"
    if report.listed:
        return f"no NVIDIA GPU here is for jobs: CUDA_VISIBLE_DEVICES hides all {report.listed}"
    if report.on_the_bus:
        return "no NVIDIA driver here: jobs run on the CPU"
    return "no NVIDIA GPU here: jobs run on the CPU"


def _gpus(gpus: tuple[Gpu, ...]) -> str:
    head = ("GPU", "model", "driver", "memory", "temp", "power", "PCIe", "ECC errors", "fabric", "slowed by")
    return table([head, *(_row(gpu) for gpu in gpus)])


def _row(gpu: Gpu) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.name.removeprefix("NVIDIA "),
        gpu.driver,
        f"{(gpu.memory_used_mib or 0) / 1024:.1f}/{gpu.memory_mib / 1024:.1f} GiB"
        if gpu.memory_mib
        else "the machine's",
        _or_dash(gpu.temperature, " °C"),
        _or_dash(round(gpu.power) if gpu.power is not None else None, " W"),
        f"gen {_or_dash(gpu.pcie_generation)} ×{_or_dash(gpu.pcie_width)}",
        _or_dash(gpu.ecc_uncorrected),
        gpu.fabric or "-",
        ", ".join(gpu.slowdowns) or "-",
    )


def _or_dash(value: object, unit: str = "") -> str:
    return f"{value}{unit}" if value is not None else "-"


# `gc`: what bears gpucloud's tags and belongs to no living job, shown, and removed when it was seen twice.


_LEFT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What `gc` is asked: where to look, whether to remove, and whether to sit the minute out."""

    clouds: tuple[Cloud, ...] = ()
    regions: tuple[str, ...] = ()
    store: str | None = None
    delete: bool = False
    wait: bool = False


def gc(asked: Sweep, *, as_json: bool) -> int:
    """Look for strays and answer; return 30 while there are any, else 0, or the code of what could not be read.

    That, an account or a store, keeps nobody from the others. Raises its error where there was nothing else to look at.
    """
    cloud = Gpucloud()
    if asked.regions:
        cloud.aws(AwsChoices(), Resources()).require_regions(asked.regions)
    results: list[Swept] = []
    looks: list[Census] = []
    unasked: list[Unasked] = []
    left_alone: list[Unasked] = []
    for one in sweepers(cloud, asked.clouds, asked.store, asked.regions, tell):
        if isinstance(one, Unasked):
            unasked.append(one)
            continue
        try:
            swept = _sweep(one, asked)
        except GpucloudError as error:
            unasked.append(Unasked(None, error, one.store.url))
            continue
        looks.append(one.census)
        results.append(swept)
        if swept.away is not None:
            unasked.append(Unasked(None, swept.away, one.store.url))
        left_alone += [Unasked(None, error, one.store.url) for error in swept.unread]
    if unasked and not looks:
        raise unasked[0].error
    found = tuple(thing for swept in results for thing in swept.strays)
    tell(_looked_at(looks, may_name=not asked.clouds and Cloud.AWS not in swept_clouds(cloud, ())))
    for missing in unasked:
        tell(f"NOT LOOKED AT: {_place(missing)}: {missing.error}")
    every = (*unasked, *left_alone)
    if as_json:
        unread = [{"profile": one.profile, "store": one.store, **error_fields(one.error)} for one in every]
        strays = [_json(thing, swept) for swept in results for thing in swept.strays]
        say_json({"strays": strays, "looked_at": _looked_at_json(looks), "unread": unread})
    else:
        say(_text(results))
    _advise(found, asked, len(_foreign(results)))
    return _LEFT if found else max((one.error.exit_code for one in every), default=0)


def _sweep(sweeper: Sweeper, asked: Sweep) -> Swept:
    swept = sweeper.look()
    if asked.wait and swept.strays:
        tell(f"{len(swept.strays)} strays: looking again when they were first seen a minute ago")
        swept = sweeper.wait_for_a_second_look(swept)
    return sweeper.remove(swept) if asked.delete and swept.ripe else swept


def _looked_at(looks: Sequence[Census], *, may_name: bool) -> str:
    """Say of which clouds, accounts and regions the answer is: elsewhere things may stand all the same.

    `may_name`: AWS was not named, and was not asked for that.
    """
    regions = _regions(looks)
    places = [f"AWS {account} in {', '.join(where)}" if where else "the embedded fleet" for account, where in regions]
    line = f"looked at: {', '.join(places)}"
    if may_name:
        return f"{line}; AWS was not asked, no job known here ran there (--cloud aws asks)"
    return f"{line} (--region asks elsewhere)" if any(where for _, where in regions) else line


def _regions(looks: Sequence[Census]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each account with its regions; of one, each store's look is of the same."""
    return tuple(dict.fromkeys((look.account, look.regions) for look in looks))


def _looked_at_json(looks: Sequence[Census]) -> list[dict[str, Any]]:
    return [
        {"cloud": (Cloud.AWS if where else Cloud.LOCAL).value, "account": account if where else None, "regions": where}
        for account, where in _regions(looks)
    ]


def _place(one: Unasked) -> str:
    if one.store is not None:
        return f"what jobs in {one.store} have, which is left alone"
    return f"AWS by profile {one.profile}" if one.profile else "AWS"


def _foreign(results: list[Swept]) -> frozenset[str]:
    """Return what is of no store that was looked at; each store's look lists what all the others have too."""
    listed: frozenset[str] = frozenset().union(*(swept.foreign for swept in results))
    return listed.difference(*(swept.owned for swept in results))


def _advise(found: tuple[Thing, ...], asked: Sweep, foreign: int) -> None:
    if foreign:
        many = f"{foreign} thing{'' if foreign == 1 else 's'}"
        tell(f"left alone: {many} of clusters of other stores, or not tagged to the letter")
    if found and not asked.delete:
        tell("nothing was removed; `gpucloud gc --yes` removes what was seen as a stray twice, a minute apart")
    elif found:
        tell("what is listed was seen for the first time, or could not be removed: the same again in a minute")


def _text(results: list[Swept]) -> str:
    things = [(thing, swept) for swept in results for thing in swept.strays]
    if not things:
        return "no strays"
    rows: list[tuple[str, ...]] = [("what", "id", "cluster", "region", "since", "first seen", "USD/h")]
    rows += [_stray_row(thing, swept) for thing, swept in things]
    hourly = sum((thing.usd_per_hour or ZERO for thing, _ in things), ZERO)
    sums = f"\n\n{format_usd(hourly)} an hour, where it is known" if hourly else ""
    return table(rows) + sums


def _stray_row(thing: Thing, swept: Swept) -> tuple[str, ...]:
    since = f"{thing.since:%Y-%m-%d %H:%M}" if thing.since else "-"
    return (
        *(thing.kind, thing.id, thing.cluster, thing.region, since, _ago(swept.first_seen.get(thing.key))),
        usd(thing.usd_per_hour) if thing.usd_per_hour is not None else _unknown(thing),
    )


def _ago(first: datetime | None) -> str:
    ago = datetime.now(timezone.utc) - first if first is not None else None
    return "now" if ago is None or ago.total_seconds() < 1 else f"{format_span(ago)} ago"


def _unknown(thing: Thing) -> str:
    """Only machines and disks cost by the hour; everything else of a cluster is free."""
    return "?" if thing.kind in {"instance", "volume"} else "-"


def _json(thing: Thing, swept: Swept) -> dict[str, Any]:
    costs: Decimal | None = thing.usd_per_hour
    return {
        "kind": thing.kind,
        "id": thing.id,
        "cluster": thing.cluster,
        "region": thing.region,
        "account": thing.account,
        "since": codec.plain(thing.since),
        "first_seen": codec.plain(swept.first_seen.get(thing.key)),
        "usd_per_hour": usd(costs) if costs is not None else None,
    }


# `gpucloud local interrupt|kill|freeze|shortage`: what the embedded fleet does when asked.


_NODE_ID = re.compile(r"i-0[0-9a-f]{16}")


class Drill(Enum):
    """What is done to a node; the value is the word for it when it is done."""

    INTERRUPT = "noticed"
    KILL = "lost"
    FREEZE = "frozen"
    REBALANCE = "recommended to leave"


def drill(target: str | None, node_id: str | None, what: Drill, *, as_json: bool) -> int:
    """Have the embedded cloud do that to a node; return the exit code.

    `target` is the node itself, or a job as elsewhere; then `node_id`, or the job's first node that is up, is meant.
    """
    nodes, job, group, node = _meant(target, node_id)
    _does(nodes, what)(group, node)
    if as_json:
        say_json({"job": job, "node": node, "done": what.value})
    else:
        say(f"{node}: {what.value}")
    return 0


def shortage(lasting: str, *, as_json: bool) -> int:
    """Have the embedded cloud start no spot machines for that long, 0s: from now on again; return the exit code."""
    try:
        span = parse_span(lasting)
    except ValueError as error:
        raise UsageError(str(error), hint="gpucloud local shortage 5min") from error
    now = datetime.now(timezone.utc)
    Gpucloud().local().nodes().run_short(now + span)
    if as_json:
        say_json({"no_spot_until": codec.plain(now + span)})
        return 0
    say(shortage_line(span, now))
    if not span:
        tell("a job that was refused asks again within a minute: gpucloud status JOB says when")
    return 0


def shortage_line(span: timedelta, now: datetime) -> str:
    """Return what a shortage of that length means."""
    if not span:
        return "spot machines start again"
    return f"no spot machines start until {format_moment(now + span, now)}; those that run stay"


def _does(nodes: LocalNodeGroup, what: Drill) -> Callable[[str, str], None]:
    match what:
        case Drill.INTERRUPT:
            return lambda group, node: nodes.interrupt(group, node, notice=True)
        case Drill.KILL:
            return lambda group, node: nodes.interrupt(group, node, notice=False)
        case Drill.FREEZE:
            return nodes.freeze
        case Drill.REBALANCE:
            return nodes.recommend_rebalance


def _meant(target: str | None, node_id: str | None) -> tuple[LocalNodeGroup, str, str, str]:
    """Return the embedded cloud's groups, and the job, the group and the node that are meant."""
    cloud = Gpucloud()
    if target is not None and node_id is None and _NODE_ID.fullmatch(target):
        nodes = cloud.local().nodes()
        found = nodes.owner_of(target)
        if found is None:
            raise UsageError(f"no machine of the embedded fleet is called {target}", hint="gpucloud status JOB")
        group, job = found
        return nodes, job, group, target
    known = known_job(cloud, target)
    require_embedded(known)
    nodes = cloud.local().nodes()
    node = one_node(cloud, known, node_id)
    return nodes, known.name, group_of(cloud, known), node.id
