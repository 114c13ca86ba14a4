"""When a budget ends is told as it comes: by the plan, by the panel at every pass, and by the machines that end it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st

from gpucloud.agent.attempt.decide import Prepaid, PrepaidPhase, Saving
from gpucloud.domain.job.spec import MarketPolicy, Resources
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule, Prolonged, Spend, paid_until, reserve_usd
from gpucloud.domain.money.ledger import ZERO, usd_for
from gpucloud.domain.node.status import LEAVES_AHEAD, LEAVES_MEASURED_SHARE, LEAVES_SHARE
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Arm, EndAttempt
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.renewal import renew
from gpucloud.domain.supervision.snapshot import Rules
from tests.unit.test_least_budget import offer
from tests.unit.worlds import NOW, goal, job, opened, part, snapshot, state, up

AWS = PrepaidRule(
    reserve=timedelta(seconds=300),
    least=timedelta(minutes=15),
    start=timedelta(minutes=10),
)
MINUTE = timedelta(minutes=1)
PASS = timedelta(seconds=2)


@dataclass(frozen=True)
class Prices:
    """Machines at one price, with a budget; `saving`: how long saves were measured to take, None for none."""

    nodes: int
    usd_per_hour: Decimal
    cap_usd_per_hour: Decimal
    budget_usd: Decimal
    rule: PrepaidRule
    saving: Saving | None = None
    saves: bool = True
    outputs: bool = False
    """Whether what it writes is to come home: of a script that does not save, its supervisor ends it for that."""

    @property
    def leaves_early(self):
        """Whether it does not train to the end of its paid time."""
        return self.saves or self.outputs

    @property
    def late(self):
        """By what an end may come later than it is told: a prolongation of paid time, and what a pass makes of it."""
        dearer = float(self.cap_usd_per_hour / self.usd_per_hour)
        return (self.rule.least_gain + 2 * PASS) * dearer + PASS


class Machines:
    """Machines that are paid for pass by pass, from their launch at NOW; the attempt begins after `boot`."""

    def __init__(self, prices, boot):
        self.prices, self.begins = prices, NOW + boot
        self.at = NOW
        self.ids = tuple("abcdefgh"[: prices.nodes])
        self.members = tuple(up(one, part(step=1 if prices.saves else None), launched_at=NOW) for one in self.ids)
        self.armed = self._payable(launched=False)
        self.told, self.ends = [], False

    def asked_at(self):
        """Return when the job is asked to save, or its machines end: pass by pass, as it is decided."""
        while not self._is_over():
            self.at += PASS
            self._supervise()
        return self.at

    def spend(self):
        prices, paid = self.prices, Prepaid(until=self.armed, heard_at=self.begins)
        leaves, most = paid.ahead(prices.saving), LEAVES_AHEAD
        most = prices.saving.most_ahead if prices.saving else most
        ahead = max(timedelta(0), NOW + MINUTE - self.at)
        return Spend(
            budget_usd=prices.budget_usd,
            spent_usd=self._spent_usd(),
            promised_usd=ZERO,
            kept_usd=reserve_usd(prices.nodes, prices.cap_usd_per_hour, prices.rule),
            usd_per_hour=prices.usd_per_hour * prices.nodes,
            cap_usd_per_hour=prices.cap_usd_per_hour * prices.nodes,
            ahead_usd=usd_for(prices.usd_per_hour * prices.nodes, ahead),
            gain=prices.rule.least_gain,
            as_of=self.at,
            off_at=self.armed,
            leaves=leaves if prices.leaves_early else timedelta(0),
            leaves_at_most=most if prices.leaves_early else timedelta(0),
            leaves_share=LEAVES_MEASURED_SHARE if prices.saving else LEAVES_SHARE,
        ).for_job_of(timedelta(days=1000))

    def _is_over(self):
        if self.at < self.begins:
            return False
        phase = Prepaid(until=self.armed, heard_at=self.begins).phase(self.at, self.prices.saving)
        return self.ends or phase is PrepaidPhase.PASSED or (phase is PrepaidPhase.NEAR and self.prices.saves)

    def _supervise(self):
        rules = Rules(prepaid_rule=self.prices.rule)
        attempt = replace(opened(*self.ids), started_at=self.begins)
        runs = self.at >= self.begins
        leaves = self.spend().leaves.total_seconds()
        seen = snapshot(
            *(replace(one, status=replace(one.status, leaves_s=leaves)) for one in self.members),
            group_size=self.prices.nodes,
            armed=self.armed,
            now=self.at,
            state=state(attempts=(attempt,) if runs else ()),
            payable_until=self._payable(),
            payable_with_another=None,
            lasts_until=self._payable(rule=replace(self.prices.rule, least=timedelta(0))),
        )
        mute, outputs = not self.prices.saves, self.prices.outputs
        wanted = goal(nodes=self.prices.nodes, saves_nothing=mute, has_outputs=outputs)
        action = decide(wanted, seen, rules) if runs else renew(wanted, seen, rules.prepaid_rule, rules.limits)
        self.ends = isinstance(action, EndAttempt) and action.reason is ExitReason.BUDGET
        if isinstance(action, Arm):
            self.armed = action.until
        if runs:
            self.told.append((self.at, self.spend()))

    def _spent_usd(self):
        return usd_for(self.prices.usd_per_hour * self.prices.nodes, max(MINUTE, self.at - NOW))

    def _payable(self, *, launched=True, rule=None):
        prices = self.prices
        charge = usd_for(prices.cap_usd_per_hour * prices.nodes, MINUTE)
        return paid_until(
            self.at,
            left_usd=prices.budget_usd - (self._spent_usd() if launched else ZERO),
            nodes=prices.nodes,
            cap_usd_per_hour=prices.cap_usd_per_hour,
            prepaid_rule=rule or prices.rule,
            launched=launched,
            coming_usd=ZERO if launched else charge,
        )


def saves_of(seconds):
    """Those of 27 s are asked for a minute before the end at the most, as where none was measured."""
    return Saving(save=timedelta(seconds=seconds), step=timedelta(seconds=0.5))


@st.composite
def jobs(draw):
    """A job that may be begun, and trains for some minutes at least."""
    cap = Decimal(draw(st.integers(20, 1000))) / 100
    usd = cap * draw(st.integers(25, 100)) / 100
    nodes, rule = draw(st.integers(1, 4)), draw(st.sampled_from((PrepaidRule(), AWS)))
    paid = rule.start + rule.least + timedelta(minutes=draw(st.integers(0, 15)))
    budget = usd_for(cap * nodes, paid) + reserve_usd(nodes, cap, rule) + Decimal("0.00000002")
    saves, outputs = draw(st.sampled_from(((True, False), (True, True), (False, False), (False, True))))
    saving = draw(st.sampled_from((None, None, saves_of(0.2), saves_of(27), saves_of(30)))) if saves else None
    return Prices(nodes, usd, cap, budget, rule, saving, saves, outputs)


@settings(max_examples=20, deadline=None)
@given(prices=jobs(), booted=st.integers(1, 10))
def test_a_job_is_asked_to_save_when_every_pass_said_that_its_budget_ends(prices, booted):
    machines = Machines(prices, prices.rule.start * booted / 10)
    at = machines.asked_at()

    told = [(seen, spend.ends_at) for seen, spend in machines.told if spend.is_short and not spend.is_used_up]
    assert told
    for seen, ends_at in told:
        assert ends_at - 2 * PASS <= at <= ends_at + prices.late, f"{at - NOW} and not {ends_at - NOW}, at {seen - NOW}"


@settings(max_examples=20, deadline=None)
@given(prices=jobs())
def test_a_job_trains_for_as_long_as_its_plan_says(prices):
    prices = replace(prices, saving=None)
    resources = Resources(nodes=prices.nodes, market=MarketPolicy.ON_DEMAND)
    outputs = ("results/",) if prices.outputs else ()
    wanted = job(budget_usd=prices.budget_usd, resources=resources, outputs=outputs)
    one = offer(prices.usd_per_hour, prices.cap_usd_per_hour)
    plan = make_plan(wanted, (one,), NOW, prices.rule, saves=prices.saves)

    machines = Machines(prices, prices.rule.start)
    trained = machines.asked_at() - machines.begins

    assert plan.trains - 2 * PASS <= trained <= plan.trains + prices.late


def test_the_share_of_a_longer_time_that_is_kept_for_a_save_is_that_of_measured_saves_whatever_they_take():
    paid, hour = timedelta(minutes=2), Decimal(60)
    plain = {"usd": Decimal(10), "usd_per_hour": hour, "cap_usd_per_hour": hour, "paid": paid, "gain": timedelta(0)}
    for most in (59, 60, 61):
        at_most = {"leaves": timedelta(seconds=24), "leaves_at_most": timedelta(seconds=most)}
        assert Prolonged(**plain, **at_most, leaves_share=0.05).leaves_then == timedelta(seconds=48)
