"""Makes the package's recorded markets from their sources: `python -m tests.recordings FOLDER`.

FOLDER holds the sources as their repositories have them, one folder each; which commits these are says the NOTICE
beside the recordings. The same sources give the same bytes.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

RECORDINGS = Path(__file__).resolve().parent.parent / "gpucloud" / "adapters" / "markets" / "recordings"

EVENT_TICK_S = 180
"""How finely logs of single events are kept: the least number of nodes within each such span."""

UNRECORDED_SPOT = Decimal("0.318")
"""Spot as a share of the list price where no price was recorded: as the reference replays of these traces have it."""

GCP_SPOT = Decimal("0.30")
"""What a preemptible GPU cost on GCP then, as a share of its list price: fixed, whatever the zone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A machine: its GPU, and its Linux list price in USD per hour in the market's first region at that time."""

    name: str
    gpus: int
    gpu: str
    on_demand: str


P3_2X = Kind("p3.2xlarge", 1, "V100", "3.06")
P3_16X = Kind("p3.16xlarge", 8, "V100", "24.48")
P2_X = Kind("p2.xlarge", 1, "K80", "0.90")
P2_8X = Kind("p2.8xlarge", 8, "K80", "7.20")
G4DN = Kind("g4dn.xlarge", 1, "T4", "0.526")
# On GCP a GPU is added to a machine: the prices are the GPUs'.
GCP_V100 = Kind("v100", 1, "V100", "2.48")
GCP_P100 = Kind("p100", 1, "P100", "1.46")
GCP_K80 = Kind("k80", 1, "K80", "0.45")
GCP_8V100 = Kind("8xv100", 8, "V100", "19.84")
GCP_8K80 = Kind("8xk80", 8, "K80", "3.60")
GCP_A100 = Kind("a100", 1, "A100", "2.93")

APACHE_PROBES = "github.com/mert-cemri/autoevolve d4b77d8, examples_ADRS/cant-be-late (Apache-2.0)"
APACHE_PRICED = "github.com/mert-cemri/autoevolve d4b77d8, examples_ADRS/cant-be-late-multi (Apache-2.0)"
BAMBOO = "github.com/uclasystem/bamboo 8080929, {} (MIT)"
DIME = "github.com/stanford-futuredata/training_on_a_dime 85f6595, logs (MIT)"


@dataclass(slots=True)
class Track:
    """A zone: how many nodes there were at each tick, and the spot price at each."""

    nodes: list[int]
    prices: list[Decimal]


def main(arguments: list[str]) -> int:
    (folder,) = map(Path, arguments)
    for old in RECORDINGS.glob("*.json"):
        old.unlink()
    for name, market in itertools.chain(probed(folder), priced(folder), kept_running(folder), counted(folder)):
        (RECORDINGS / f"{name}.json").write_text(written(market), encoding="utf-8")
    return 0


def market(
    kind: Kind,
    tick_s: int,
    started_at: datetime | None,
    tracks: dict[str, Track],
    about: str,
    source: str,
    *,
    recorded: bool,
) -> dict[str, object]:
    """Return what the file says; zones that were looked at one after the other end with the first that ends."""
    ticks = min(len(track.nodes) for track in tracks.values())
    return {
        "about": about,
        "source": source,
        "instance_type": kind.name,
        "gpus": kind.gpus,
        "gpu": kind.gpu,
        "nodes": max(max(track.nodes) for track in tracks.values()),
        "started_at": started_at.isoformat() if started_at else None,
        "tick_s": tick_s,
        "ticks": ticks,
        "on_demand_usd_per_hour": kind.on_demand,
        "prices_recorded": recorded,
        "zones": {
            zone: {"nodes": runs(track.nodes[:ticks]), "usd_per_hour": runs(track.prices[:ticks])}
            for zone, track in sorted(tracks.items())
        },
    }


def runs(values: Iterable[object]) -> str:
    """Return the values run by run: "25x0 3x1" is 25 ticks of 0, then 3 of 1."""
    return " ".join(f"{sum(1 for _ in run)}x{value}" for value, run in itertools.groupby(values))


def written(market: dict[str, object]) -> str:
    return json.dumps(market, indent=1) + "\n"


def probed(folder: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """SkyPilot's probes: every ten minutes a launch was tried; the third column says whether it FAILED."""
    campaigns = {"2022-10": "2022-10-26T22-05", "2022-11": "2022-11-28T22-23", "2022-12": "2022-12-13T19-23"}
    kinds = {"v100_1": P3_2X, "v100_8": P3_16X, "k80_1": P2_X, "k80_8": P2_8X}
    for (month, campaign), (key, kind) in itertools.product(campaigns.items(), kinds.items()):
        tracks, started = {}, None
        for zone in ("us-west-2a", "us-west-2b"):
            text = (folder / "skyspot-probe-logs" / campaign / f"{zone}_{key}.txt").read_text(encoding="utf-8")
            rows = [line.split(",") for line in text.splitlines()]
            started = _time(rows[0][1])
            tracks[zone] = Track([1 - int(failed) for _, _, failed in rows], [_assumed(kind)] * len(rows))
        about = "launches tried every 10 min on AWS"
        yield f"{kind.name}-{month}", market(kind, 600, started, tracks, about, APACHE_PROBES, recorded=False)


def priced(folder: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Nine zones with their spot prices."""
    with gzip.open(
        folder / "p3.2xlarge-9zones-2023-avail-price" / "avail_price.csv.gz", "rt", encoding="utf-8"
    ) as file:
        rows = list(csv.DictReader(file))
    zones = [key.removesuffix("_avail") for key in rows[0] if key.endswith("_avail")]
    tracks = {
        zone: Track([int(row[f"{zone}_avail"]) for row in rows], [_price(row[f"{zone}_usd_per_h"]) for row in rows])
        for zone in zones
    }
    about = "launches tried every 195 s on AWS"
    yield "p3.2xlarge-2023-02", market(P3_2X, 195, _time(rows[0]["utc"]), tracks, about, APACHE_PRICED, recorded=True)


def kept_running(folder: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Stanford's logs: one instance of each kind kept running, looked at every ten minutes."""
    logs = folder / "training-on-a-dime" / "logs"
    about = "one machine kept running, looked at every 10 min, on "
    aws = {(1, "v100"): P3_2X, (8, "v100"): P3_16X, (1, "k80"): P2_X, (8, "k80"): P2_8X}
    gcp = {
        (1, "v100"): GCP_V100,
        (1, "p100"): GCP_P100,
        (1, "k80"): GCP_K80,
        (8, "v100"): GCP_8V100,
        (8, "k80"): GCP_8K80,
    }
    started, found = _aws_looks(logs / "aws" / "availability" / "persistent_2020-03-15.out")
    for key, kind in aws.items():
        tracks = {
            zone: Track(nodes, _spot_prices(logs / "aws" / "cost", kind, zone, started, len(nodes)))
            for (gpus, zone), nodes in found.items()
            if gpus == key
        }
        yield f"{kind.name}-2020-03", market(kind, EVENT_TICK_S, started, tracks, about + "AWS", DIME, recorded=True)
    for log in sorted((logs / "gcp" / "availability").iterdir()):
        started, found = _gcp_looks(log)
        for key, kind in gcp.items():
            tracks = {
                zone: Track(nodes, [_price(Decimal(kind.on_demand) * GCP_SPOT)] * len(nodes))
                for (gpus, zone), nodes in found.items()
                if gpus == key
            }
            if tracks:
                answer = market(kind, EVENT_TICK_S, started, tracks, about + "GCP", DIME, recorded=False)
                yield f"gcp-{kind.name}-2020-03", answer


def counted(folder: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Bamboo's logs: how many nodes of a large group ran."""
    bamboo = folder / "bamboo"
    about = "nodes of a group that ran, on "
    for name, kind, zone in (("p3", P3_2X, "unnamed-p3"), ("g4dn", G4DN, "unnamed-g4dn")):
        track = Track(_lowest(_group_changes(bamboo / f"{name}-trace.csv")), [])
        track.prices = [_assumed(kind)] * len(track.nodes)
        answer = market(kind, EVENT_TICK_S, None, {zone: track}, about + "AWS", BAMBOO.format("traces"), recorded=False)
        yield f"{kind.name}-group", answer
    spans = {
        "p2.xlarge-2020-11": (P2_X, "unnamed-p2", "aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv", 3600.0),
        "g4dn.xlarge-2020-11": (
            G4DN,
            "us-east-1c",
            "aws-spot-instances-g4dn-xlarge-us-east-1c-2020-11-20-1930-to-2020-11-21-2200.csv",
            1.0,
        ),
    }
    for name, (kind, zone, file, unit_s) in spans.items():
        lines = (bamboo / "2020" / file).read_text(encoding="utf-8").splitlines()
        changes = [(float(after) * unit_s, int(count)) for after, count in (line.split(",") for line in lines)]
        track = Track(_lowest(_from_first_nodes(changes)), [])
        track.prices = [_assumed(kind)] * len(track.nodes)
        started = datetime(2020, 11, 20, tzinfo=timezone.utc)
        source = BAMBOO.format("doc/data")
        yield name, market(kind, EVENT_TICK_S, started, {zone: track}, about + "AWS", source, recorded=False)
    for kind, file, zone in (
        (GCP_A100, "a100x1-east1b.txt", "us-east1-b"),
        (GCP_V100, "v100x1-east1c.txt", "us-east1-c"),
    ):
        rows = [line.split(", ") for line in (bamboo / file).read_text(encoding="utf-8").splitlines()]
        # Each count is written three times, and those of two moments may overlap.
        observation = sorted((_time(f"{day}T{hour}"), int(count)) for day, hour, count in rows)
        started = observation[0][0]
        track = Track(_lowest([((at - started).total_seconds(), count) for at, count in observation]), [])
        track.prices = [_price(Decimal(kind.on_demand) * GCP_SPOT)] * len(track.nodes)
        source = BAMBOO.format("doc/data")
        yield (
            f"gcp-{kind.name}-2021-12",
            market(kind, EVENT_TICK_S, started, {zone: track}, about + "GCP", source, recorded=False),
        )


def _aws_looks(log: Path) -> tuple[datetime, dict[tuple[tuple[int, str], str], list[int]]]:
    """Every round goes through the same eight places in one order; a failure does not name its place."""
    order = [((n, gpu), zone) for zone in ("us-east-1b", "us-east-1c") for gpu in ("v100", "k80") for n in (1, 8)]
    looks: dict[tuple[tuple[int, str], str], list[tuple[datetime, int]]] = {place: [] for place in order}
    turn = itertools.cycle(order)
    for at, said in _lines(log):
        if re.search(r" not running |deleted ", said):
            # What was taken is asked for again at once: one that comes was taken nevertheless.
            taken = at
            continue
        place = next(turn)
        lost = "Created" in said and looks[place] and looks[place][-1][1]
        if lost:
            looks[place].append((taken, 0))
        looks[place].append((at, int("Created" in said or " running " in said)))
    started = min(at for observation in looks.values() for at, _ in observation)
    return started, {place: _track(started, observation) for place, observation in looks.items()}


def _gcp_looks(log: Path) -> tuple[datetime, dict[tuple[tuple[int, str], str], list[int]]]:
    """Every place has an instance's name of its own; what was never created is left out, its GPU not being named."""
    places: dict[str, tuple[tuple[int, str], str]] = {}
    looks: dict[str, list[tuple[datetime, int]]] = {}
    for at, said in _lines(log):
        name = re.search(r"instance\d+", said)[0]
        made = re.search(r"with (\d) GPU\(s\) of type nvidia-tesla-(\w+) in zone (\S+)", said)
        if made:
            places[name] = ((int(made[1]), made[2]), made[3])
        up = bool(made) or (" running " in said and " not " not in said)
        looks.setdefault(name, []).append((at, int(up)))
    started = min(at for observation in looks.values() for at, _ in observation)
    return started, {place: _track(started, looks[name]) for name, place in places.items()}


def _track(started: datetime, observation: list[tuple[datetime, int]]) -> list[int]:
    return _lowest([((at - started).total_seconds(), up) for at, up in observation])


def _lines(log: Path) -> Iterator[tuple[datetime, str]]:
    for line in log.read_text(encoding="utf-8").splitlines():
        at, said = re.fullmatch(r"\[(.*?)\] (.*)", line).groups()
        yield _time(at), said


def _group_changes(file: Path) -> list[tuple[float, int]]:
    count, changes = 0, []
    for line in file.read_text(encoding="utf-8").splitlines():
        after_ms, what, _ = line.split(",")
        count += 1 if what == "add" else -1
        changes.append((float(after_ms) / 1000, count))
    return _from_first_nodes(changes)


def _from_first_nodes(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Without the beginning, when the group had not been asked for yet; several changes at one moment are one."""
    settled = [list(same)[-1] for _, same in itertools.groupby(changes, key=lambda change: change[0])]
    return list(itertools.dropwhile(lambda change: change[1] == 0, settled))


def _lowest(changes: list[tuple[float, int]]) -> list[int]:
    """Return the least value within each tick, from the first change to the last."""
    start = changes[0][0]
    ticks = max(int((changes[-1][0] - start) // EVENT_TICK_S), 1)
    values, at, now = [], 0, changes[0][1]
    for tick in range(ticks):
        least = now
        while at < len(changes) and changes[at][0] - start < (tick + 1) * EVENT_TICK_S:
            now = changes[at][1]
            least = min(least, now)
            at += 1
        values.append(least)
    return values


def _spot_prices(folder: Path, kind: Kind, zone: str, started: datetime, ticks: int) -> list[Decimal]:
    """Return the price at each tick from AWS's price history, of which there are several dated pieces."""
    points = {}
    for file in sorted((folder / zone[:-1]).glob(f"*{kind.name}.json")):
        for point in json.loads(file.read_text(encoding="utf-8"))["SpotPriceHistory"]:
            if point["AvailabilityZone"] == zone and point["ProductDescription"] == "Linux/UNIX":
                points[_time(point["Timestamp"])] = _price(point["SpotPrice"])
    known = sorted(points.items())
    at, prices = 0, []
    for tick in range(ticks):
        now = started + timedelta(seconds=tick * EVENT_TICK_S)
        while at + 1 < len(known) and known[at + 1][0] <= now:
            at += 1
        prices.append(known[at][1])
    return prices


def _assumed(kind: Kind) -> Decimal:
    return _price(Decimal(kind.on_demand) * UNRECORDED_SPOT)


def _price(usd: object) -> Decimal:
    return Decimal(str(usd)).quantize(Decimal("0.0001"))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).replace(tzinfo=timezone.utc)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
