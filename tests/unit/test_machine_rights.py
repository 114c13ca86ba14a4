"""What a machine decides that drives its job where its role lets it move no shut-off and give no machine up."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from gpucloud.domain.job import Market, Resources
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state import Interruption, InterruptionKind
from gpucloud.domain.supervision.action import Arm, Relieve
from gpucloud.domain.supervision.prepaid import Wall
from gpucloud.domain.supervision.seen import Goal, Limits, Rules
from gpucloud.domain.supervision.upkeep import make_room, renew
from gpucloud.usecases.owngroup import OwnMarket
from tests.unit.worlds import NOW, seen, state, up

DRIVES = Goal(nodes=2, budget_usd=Decimal(1), self_driving=True)
WITHIN_RIGHTS = replace(DRIVES, within_rights=True)
POOL = Pool(instance_type="g6e.xlarge", zone="us-east-1a", market=Market.SPOT)


def test_a_machine_with_a_notice_is_given_up_early_only_where_that_is_allowed() -> None:
    noted = Interruption(node_id="n1", kind=InterruptionKind.NOTICE, attempt=None, noticed_at=NOW)
    noticed = seen(up("n1", notice=True), up("n2"), state=state(interruptions=(noted,)))
    assert make_room(DRIVES, noticed, Wall()) == Relieve(node_id="n1")
    assert make_room(WITHIN_RIGHTS, noticed, Wall()) is None


def test_the_shut_off_is_brought_forward_only_where_that_is_allowed() -> None:
    sooner = NOW + timedelta(minutes=5)
    dear = seen(up("n1"), up("n2"), payable_until=sooner)
    assert renew(DRIVES, dear, Rules().wall, Limits()) == Arm(until=sooner)
    assert renew(WITHIN_RIGHTS, dear, Rules().wall, Limits()) is None


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
