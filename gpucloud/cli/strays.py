"""`gc`: what bears gpucloud's tags and belongs to no living job, shown, and removed when it was seen twice."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from gpucloud.cli.render import say, say_json, table, tell, usd
from gpucloud.domain import codec
from gpucloud.domain.job import Cloud
from gpucloud.domain.ledger import ZERO
from gpucloud.domain.quantities import format_span, format_usd
from gpucloud.domain.strays import Thing
from gpucloud.usecases.gc import Sweeper, Swept
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.strays import sweepers, swept_clouds

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
    """Look for strays and answer; return 30 while there are any, else 0."""
    cloud = Gpucloud()
    results = [_sweep(one, asked) for one in sweepers(cloud, asked.clouds, asked.store, asked.regions, tell)]
    found = tuple(thing for swept in results for thing in swept.strays)
    tell(_looked_at(swept_clouds(cloud, asked.clouds), is_asked=bool(asked.clouds)))
    if as_json:
        say_json({"strays": [_json(thing, swept) for swept in results for thing in swept.strays]})
    else:
        say(_text(results))
    _advise(found, asked, len(_foreign(results)))
    return _LEFT if found else 0


def _sweep(sweeper: Sweeper, asked: Sweep) -> Swept:
    swept = sweeper.look()
    if asked.wait and swept.strays:
        tell(f"{len(swept.strays)} strays: looking again when they were first seen a minute ago")
        swept = sweeper.wait_for_a_second_look(swept)
    return sweeper.remove(swept) if asked.delete and swept.ripe else swept


def _looked_at(clouds: tuple[Cloud, ...], *, is_asked: bool) -> str:
    """Say of which clouds the answer is: what nobody was asked about may stand there all the same."""
    line = f"looked at: {', '.join('AWS' if one is Cloud.AWS else 'the embedded fleet' for one in clouds)}"
    return (
        line
        if Cloud.AWS in clouds or is_asked
        else f"{line}; AWS was not asked, no job known here ran there (--cloud aws asks)"
    )


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
    rows += [_row(thing, swept) for thing, swept in things]
    hourly = sum((thing.usd_per_hour or ZERO for thing, _ in things), ZERO)
    sums = f"\n\n{format_usd(hourly)} an hour, where it is known" if hourly else ""
    return table(rows) + sums


def _row(thing: Thing, swept: Swept) -> tuple[str, ...]:
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
