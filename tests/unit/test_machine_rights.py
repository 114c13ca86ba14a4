"""What a machine decides that drives its job where its role lets it move no shut-off and give no machine up."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.home import Home
from gpucloud.domain.job.spec import Market, Resources
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.state import Interruption, InterruptionKind
from gpucloud.domain.supervision.action import Arm, Relieve
from gpucloud.domain.supervision.renewal import make_room, renew
from gpucloud.domain.supervision.self_driving import order_key, parse_order
from gpucloud.domain.supervision.snapshot import Goal, Limits, Rules
from gpucloud.usecases.services import OwnMarket
from gpucloud.usecases.supervise.agents import NodeRecords
from gpucloud.usecases.supervise.needs import JobData
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.aws import own_market
from tests.unit.test_driving import ORDER
from tests.unit.worlds import NOW, snapshot, state, up

DRIVES = Goal(nodes=2, budget_usd=Decimal(1), self_driving=True)
WITHIN_RIGHTS = replace(DRIVES, within_rights=True)
POOL = Pool(instance_type="g6e.xlarge", zone="us-east-1a", market=Market.SPOT)


def test_a_machine_with_a_notice_is_given_up_early_only_where_that_is_allowed() -> None:
    noted = Interruption(node_id="n1", kind=InterruptionKind.NOTICE, attempt=None, noticed_at=NOW)
    noticed = snapshot(up("n1", notice=True), up("n2"), state=state(interruptions=(noted,)))
    assert make_room(DRIVES, noticed, PrepaidRule()) == Relieve(node_id="n1")
    assert make_room(WITHIN_RIGHTS, noticed, PrepaidRule()) is None


def test_the_shut_off_is_brought_forward_only_where_that_is_allowed() -> None:
    sooner = NOW + timedelta(minutes=5)
    dear = snapshot(up("n1"), up("n2"), payable_until=sooner)
    assert renew(DRIVES, dear, Rules().prepaid_rule, Limits()) == Arm(until=sooner)
    assert renew(WITHIN_RIGHTS, dear, Rules().prepaid_rule, Limits()) is None


class Prices:
    """A market where everything is offered."""

    def offers(self, wanted: Resources) -> tuple[str, ...]:
        return ("an offer",)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        return (PricePoint(since=start, usd_per_hour=Decimal("0.4")),)


def test_a_machine_knows_what_machines_cost_and_is_offered_none() -> None:
    market = OwnMarket(Prices())
    at = datetime(2026, 3, 1, tzinfo=timezone.utc)
    assert market.offers(Resources()) == ()
    assert market.prices(POOL, at, at) == (PricePoint(since=at, usd_per_hour=Decimal("0.4")),)


def test_a_machine_pays_on_demand_what_was_known_outside_in_a_region_whose_prices_it_may_not_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has at hand there is a bound of twice the price: its job would end at half its budget."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    at = datetime(2026, 11, 21, tzinfo=timezone.utc)
    there = Pool(instance_type="g4dn.xlarge", zone="eu-central-1a", market=Market.ON_DEMAND)
    market = own_market(replace(ORDER, region="eu-central-1", on_demand=(("g4dn.xlarge", Decimal("0.658")),)))
    assert market.prices(there, at, at) == (PricePoint(since=at, usd_per_hour=Decimal("0.658")),)
    unknown = replace(there, instance_type="g5.xlarge")
    assert market.prices(unknown, at, at) == (PricePoint(since=at, usd_per_hour=Decimal("2.012")),)


def test_machines_are_told_what_their_types_cost_on_demand(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: digits\nbudget: 1USD\nrun: train.py\n")
    (tmp_path / "train.py").write_text("")
    cloud = Gpucloud(Home(tmp_path / "home"))
    job = replace(cloud.read_job(tmp_path / "job.yaml"), store=str(tmp_path / "store"))
    world = replace(cloud.services(job, "digits", unattended=timedelta(hours=8)), market=Prices())
    data = JobData(job=job, jobs=world.jobs, sets=None, story=print)
    bootstrapper = Bootstrapper(
        services=world, watcher=None, pool=None, syncs=None, data=data, records=None, agent_writer=None
    )  # type: ignore[arg-type]
    records = NodeRecords(world)
    for pool in (POOL, replace(POOL, instance_type="g5.xlarge"), POOL):
        records.publish(bootstrapper.needs, pool, None, lambda _: None)
    stored = world.store.get(order_key("gpucloud-digits"))
    assert stored is not None
    said = parse_order(stored.data)
    assert said.on_demand == (("g5.xlarge", Decimal("0.4")), ("g6e.xlarge", Decimal("0.4")))
    assert said.region == "us-east-1"
