"""Which run a start means: a new one, or the one that is not over yet."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.local.market import LocalMarket
from gpucloud.adapters.transfer.sync import make_tree, whole_code
from gpucloud.domain.checkpoint.protection import Saving
from gpucloud.domain.errors import BudgetRefused, NoCapacity, OrderChanged, PlanRefused, StoreError, UsageError
from gpucloud.domain.job.spec import Access, AwsChoices, Cloud, Job, Market, MarketPolicy, Model, Resources
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.launch import recipe, script_of
from gpucloud.domain.offer import EfaLayout
from gpucloud.domain.state.order import sealed, with_budget
from gpucloud.domain.state.state import CheckpointRef, ExitReason, JobStatus, UsageInterval
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.store import open_store
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.job import start as starting
from gpucloud.usecases.job.ordered import adopt
from gpucloud.usecases.job.start import Asked, Starter
from gpucloud.usecases.jobstore.condition import ConditionKind
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.jobstore.runs import current_run
from tests.fakes.account import FakeAccount
from tests.unit.worlds import POOL, opened

SPEC = b"name: digits\n"
JOB = Job(
    name="digits",
    run="train.py",
    budget_usd=Decimal(1),
    source=Path("digits.yaml"),
    code=Path(),
    resources=Resources(nodes=2),
)


SAVED = CheckpointRef(step=40, sha256="0" * 64)


@pytest.fixture
def starter(tmp_path):
    return Starter(
        store=open_store(str(tmp_path)),
        market=LocalMarket(),
        account=None,
        clock=SystemClock(),
        rules=Rules(),
        terms=Terms(),
    )


def orders(starter):
    return Orders(jobs=JobStore(starter.store, "digits"), clock=SystemClock())


def interval(node_id, launched_at):
    return UsageInterval(node_id=node_id, pool=POOL, launched_at=launched_at)


def put(starter, name, **changes):
    jobs = JobStore(starter.store, name)
    state, stored = jobs.load()
    jobs.replace(replace(state, **changes), stored.version)


def ended(reason, **changes):
    return {"status": reason.status, "exit_reason": reason, "exit_code": reason.exit_code, **changes}


def test_the_first_start_makes_the_run(starter):
    start = starter.start(JOB, SPEC)

    assert (start.name, start.continues, start.changed) == ("digits", False, ())
    assert start.plan.worst_usd == 1


@pytest.mark.parametrize(
    ("reason", "changes", "keep", "name"),
    [
        (ExitReason.SUCCEEDED, {"torn_down": True}, False, "digits-2"),
        (ExitReason.USER_ERROR, {"torn_down": True, "attempts": (opened("a"),)}, False, "digits"),
        (ExitReason.USER_ERROR, {"torn_down": True}, False, "digits"),  # its setup failed: nothing has run
        (ExitReason.SUCCEEDED, {}, True, "digits-2"),
        (ExitReason.SUCCEEDED, {}, False, "digits"),
        (ExitReason.STOPPED, {"torn_down": True}, True, "digits"),
        (ExitReason.BUDGET, {"torn_down": True}, False, "digits"),
        (ExitReason.LOST, {"torn_down": True}, False, "digits"),
    ],
)
def test_a_run_that_is_over_for_good_is_followed_by_a_new_one(starter, reason, changes, keep, name):
    starter.start(JOB, SPEC, Asked(keep=keep))
    put(starter, "digits", **ended(reason, **changes))

    assert starter.start(JOB, SPEC).name == name


@pytest.mark.parametrize("is_over", [False, True])
def test_two_job_files_of_one_name_do_not_go_on_with_each_others_weights(starter, tmp_path, is_over):
    files = [tmp_path / folder / "digits.yaml" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(SPEC)
    mine, other = (replace(JOB, source=file) for file in files)
    starter.start(mine, SPEC)
    if is_over:
        put(starter, "digits", **ended(ExitReason.SUCCEEDED, torn_down=True))

    stands = "succeeded" if is_over else "unfinished"
    with pytest.raises(UsageError, match=f"digits is a run of {files[0]}, {stands}, and ") as refused:
        starter.start(other, SPEC)
    does = "begins its next run" if is_over else "takes that run over"
    assert refused.value.hint == f"name: digits-b in this file; gpucloud train digits.yaml --adopt {does}"
    assert starter.start(other, SPEC, Asked(adopts=True)).name == ("digits-2" if is_over else "digits")

    files[0].unlink()  # moved
    assert starter.start(other, SPEC).name == ("digits-2" if is_over else "digits")


def test_a_job_whose_name_ends_in_a_number_is_no_run_of_another(starter):
    theirs = starter.start(replace(JOB, name="gpt-2"), SPEC)
    ours = starter.start(replace(JOB, name="gpt"), SPEC)
    put(starter, "gpt", **ended(ExitReason.SUCCEEDED, torn_down=True))
    second = starter.start(replace(JOB, name="gpt"), SPEC)

    assert [(one.name, one.order.base, one.order.run) for one in (theirs, ours, second)] == [
        ("gpt-2", "gpt-2", 1),
        ("gpt", "gpt", 1),
        ("gpt-3", "gpt", 3),
    ]
    assert starter.start(replace(JOB, name="gpt"), SPEC).name == "gpt-3"
    assert starter.start(replace(JOB, name="gpt-2"), SPEC).name == "gpt-2"


def test_a_run_that_only_lacks_its_teardown_stays_succeeded(starter):
    start = starter.start(JOB, SPEC)
    put(starter, "digits", **ended(ExitReason.SUCCEEDED))
    state = JobStore(starter.store, "digits").load()[0]

    assert adopt(state, start.plan and start.plan.offer) == state
    assert starter.start(replace(JOB, budget_usd=Decimal(7)), SPEC).order.budget_usd == 1


def test_a_stopped_run_goes_on_and_its_end_is_not_wanted_any_more(starter):
    start = starter.start(JOB, SPEC)
    orders(starter).end()
    put(starter, "digits", **ended(ExitReason.STOPPED, torn_down=True))
    state = JobStore(starter.store, "digits").load()[0]
    going_on = adopt(state, start.plan.offer)
    again = starter.start(replace(JOB, budget_usd=Decimal(7)), SPEC)

    assert (going_on.status, going_on.exit_reason) == (JobStatus.WAITING, None)
    assert (again.order.number, again.order.end, again.order.budget_usd) == (3, None, 7)
    assert [(one.old_usd, one.new_usd) for one in again.order.budget_changes] == [(1, 7)]


@pytest.mark.parametrize(
    ("ordered", "file", "flag", "counts"),
    [
        (40, 1, None, 40),  # `gpucloud budget` raised it; the file says what it said
        (40, 3, None, 3),  # the file was changed after that
        (40, 1, 5, 5),
        (None, 1, None, 1),
    ],
)
def test_the_files_budget_counts_only_where_it_changed_since_the_last_start(starter, ordered, file, flag, counts):
    starter.start(JOB, SPEC)
    if ordered is not None:
        orders(starter).change(lambda newest: with_budget(newest, Decimal(ordered)))
    asked = Asked(budget_usd=None if flag is None else Decimal(flag))
    again = starter.start(replace(JOB, budget_usd=Decimal(file)), SPEC, asked)

    assert again.order.budget_usd == counts
    assert (f"budget: {ordered or 1}.00 USD → {counts}.00 USD" in again.changed) == (counts != (ordered or 1))


def test_an_attempt_that_runs_near_the_end_of_its_budget_can_be_supervised_again(starter):
    starter.start(JOB, SPEC)
    now = SystemClock().now()
    put(
        starter,
        "digits",
        group="gpucloud-digits",
        attempts=(opened("a"),),
        nodes=(interval("a", now - timedelta(hours=9)),),
    )
    again = starter.start(JOB, SPEC)

    assert (again.name, again.continues, again.plan, again.order.budget_usd) == ("digits", True, None, 1)
    orders(starter).change(lambda newest: with_budget(newest, Decimal(40)))
    with pytest.raises(BudgetRefused, match="less than what is spent") as refused:
        starter.start(JOB, SPEC, Asked(budget_usd=Decimal("0.5")))
    least = re.search(r"at least (\d+\.\d\d) USD", str(refused.value))
    assert least is not None
    assert refused.value.hint == f"gpucloud train digits --budget '{least[1]} USD'"  # as `gpucloud budget` says


def test_what_changed_since_the_last_start_is_said(starter):
    starter.start(JOB, SPEC)
    again = starter.start(replace(JOB, budget_usd=Decimal(3)), b"name: digits\nbudget: 3 USD\n")

    assert again.continues
    assert again.changed[1] == "budget: 1.00 USD → 3.00 USD"
    assert again.changed[0] == "the job file differs from the one of the last start in budget"
    text = starter.start(JOB, SPEC + b"# it is small\n")
    assert text.changed == ("the job file differs from the one of the last start in its text alone, and in no key",)

    other = starter.start(replace(JOB, run="train.py --epochs 1", env=(("LR", "1"),)), b"name: digits\n\n")
    assert other.changed[0] == (
        "the job file differs from the one of the last start in run, env (what reaches the script: run, env)"
    )  # and nothing of resuming: nothing has run yet

    put(starter, "digits", checkpoint=CheckpointRef(step=5, sha256="0" * 64))
    saved = starter.start(replace(JOB, run="train.py --epochs 1", env=(("LR", "1"),)), b"name: digits\n\n\n")
    assert saved.changed[0] == (
        "the job file differs from the one of the last start in run, env (what reaches the script: run, env):"
        " resuming is best effort, not exact"
    )


class Ahead(SystemClock):
    """A clock that is an hour ahead of the store's."""

    def now(self):
        return super().now() + timedelta(hours=1)


def test_a_deadline_counts_from_the_first_order_by_the_stores_clock(starter):
    job = replace(JOB, deadline=timedelta(hours=12))
    before = SystemClock().now()
    first = replace(starter, clock=Ahead()).start(job, SPEC).order
    again = replace(starter, clock=Ahead()).start(replace(job, deadline=timedelta(hours=13)), SPEC).order

    assert abs(first.at - before) < timedelta(minutes=1)
    assert (first.deadline_at - first.first_at, again.deadline_at - first.first_at) == (
        timedelta(hours=12),
        timedelta(hours=13),
    )


def test_a_start_over_anothers_order_of_the_future_counts_from_now(starter):
    first = starter.start(JOB, SPEC).order
    future = replace(first, number=2, first_at=datetime(2090, 12, 31, tzinfo=timezone.utc))
    jobs = JobStore(starter.store, "digits")
    jobs.put_order(sealed(future), jobs.order()[1])

    again = starter.start(replace(JOB, deadline=timedelta(hours=12)), SPEC).order

    assert abs(again.first_at - SystemClock().now()) < timedelta(minutes=1)
    assert again.deadline_at - again.first_at == timedelta(hours=12)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"budget_usd": Decimal("0.1")}, PlanRefused),
        ({"cloud": Cloud.SSH}, PlanRefused),
        ({"cloud": Cloud.AWS, "store": "/here"}, PlanRefused),
        ({"resources": Resources(gpu=("A100",))}, PlanRefused),
        ({"resources": Resources(gpus=16)}, PlanRefused),
        ({"resources": Resources(regions=("eu-west-1",))}, PlanRefused),
    ],
)
def test_a_hopeless_plan_is_refused_before_anything_is_written(starter, changes, error):
    with pytest.raises(error):
        starter.start(replace(JOB, **changes), SPEC)
    assert starter.store.list("") == ()


class VcpuMarket(LocalMarket):
    """The embedded cloud's prices, for machines whose vCPUs count."""

    def offers(self, wanted):
        return tuple(replace(offer, vcpus=4) for offer in super().offers(wanted))


def test_a_quota_that_does_not_hold_the_machines_is_named_before_anything_is_written(starter):
    account = FakeAccount({Market.SPOT: 4, Market.ON_DEMAND: 64})
    small = replace(starter, market=VcpuMarket(), account=account)

    with pytest.raises(NoCapacity, match=r"need 8 vCPUs; the quota 'All spot' in us-east-2 is 4, of which 0") as caught:
        small.start(JOB, SPEC)

    assert "gpucloud quota request" in caught.value.hint
    assert JobStore(starter.store, "digits").load() is None


def test_what_is_used_of_a_quota_counts(starter):
    account = FakeAccount({Market.SPOT: 12, Market.ON_DEMAND: 0}, used=5)
    with pytest.raises(NoCapacity):
        replace(starter, market=VcpuMarket(), account=account).start(JOB, SPEC)


def test_a_quota_that_cannot_be_read_stops_nobody(starter):
    account = FakeAccount({Market.SPOT: None, Market.ON_DEMAND: None})
    assert replace(starter, market=VcpuMarket(), account=account).start(JOB, SPEC).plan.nodes == 2


def test_without_spot_quota_auto_takes_machines_on_demand(starter):
    account = FakeAccount({Market.SPOT: 0, Market.ON_DEMAND: 64})
    job = replace(JOB, budget_usd=Decimal(20), resources=Resources(nodes=2, market=MarketPolicy.AUTO))
    plan = replace(starter, market=VcpuMarket(), account=account).start(job, SPEC).plan
    assert plan.offer.pool.market is Market.ON_DEMAND


class EfaMarket(LocalMarket):
    """The embedded cloud's prices, for machines with several EFA interfaces."""

    def offers(self, wanted):
        efa = EfaLayout(interfaces=32, cards=32)
        return tuple(replace(offer, efa=efa) for offer in super().offers(wanted))


@pytest.mark.parametrize("access", list(Access))
def test_machines_without_a_public_address_are_planned_whatever_access_is_wished(starter, access):
    many = replace(starter, market=EfaMarket())
    offer = many.plan(replace(JOB, aws=AwsChoices(access=access))).offer
    assert offer.efa.access(access) is not Access.PUBLIC


class GpuMarket(LocalMarket):
    """The embedded cloud's prices, for machines with GPUs: 24 GB in the cheapest type, 80 GB in the others."""

    def offers(self, wanted):
        large = {False: {"gpu": "A10G", "vram_gib": 24}, True: {"gpu": "A100", "vram_gib": 80}}
        offers = super().offers(wanted)
        return tuple(replace(o, gpus=8, **large[o.pool.instance_type != "local.p2.xlarge"]) for o in offers)


def sized(model, nodes=1, gpus=8):
    return replace(JOB, budget_usd=Decimal(99), model=model, resources=Resources(nodes=nodes, gpus=gpus))


def test_gpus_that_do_not_hold_the_model_are_passed_over(starter):
    gpus = replace(starter, market=GpuMarket())
    small = gpus.plan(sized(Model(params=800_000_000))).offer
    large = gpus.plan(sized(Model(params=3_000_000_000))).offer

    assert (small.vram_gib, large.vram_gib) == (24, 80)
    assert small.usd_per_hour < large.usd_per_hour


def test_a_model_that_no_gpu_holds_is_refused_with_the_number_that_must_move(starter):
    with pytest.raises(PlanRefused) as caught:
        replace(starter, market=GpuMarket()).plan(sized(Model(params=7_000_000_000)))

    assert caught.value.message.startswith(
        "7.0B bf16 adamw ddp over 8 GPUs needs 112.0 GB states + 42.0 GB working + 17.4 GB margin = 171.4 GB of each;"
        " the most that is offered is 80 GB ("
    )
    assert caught.value.hint == "model: {strategy: fsdp} needs 18.8 GB a GPU"


def test_a_model_on_nodes_without_gpus_is_not_refused(starter):
    assert starter.plan(replace(JOB, model=Model(params=7_000_000_000))).offer.gpu is None


@pytest.fixture
def pinning(starter, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('old')\n")
    return replace(starter, pack_code=whole_code), replace(JOB, code=tmp_path / "code")


def edit(job):
    (job.code / "train.py").write_text("print('new code')\n")


def kept(starter):
    return [key.rpartition("/")[2] for key in starter.store.list("jobs/digits/control/code/")]


def tree_of(starter, sha256, folder):
    return make_tree(folder, sha256, lambda: JobStore(starter.store, "digits").code(sha256))


def test_a_start_pins_the_code_that_its_order_names(pinning, tmp_path):
    starter, job = pinning
    start = starter.start(job, SPEC)
    edit(job)

    assert kept(starter) == [start.order.code_sha256]
    tree = tree_of(starter, start.order.code_sha256, tmp_path / "here")
    assert (tree / "train.py").read_text() == "print('old')\n"
    assert whole_code(tree, limit=1000).sha256 == start.order.code_sha256  # machines get the same tree from it


def test_the_same_code_is_not_put_into_the_store_again(pinning):
    starter, job = pinning
    first = starter.start(job, SPEC)
    starter.store.put(f"jobs/digits/control/code/{first.order.code_sha256}", b"as it was put first")
    second = starter.start(job, SPEC)

    assert second.order.code_sha256 == first.order.code_sha256
    assert starter.store.get(f"jobs/digits/control/code/{first.order.code_sha256}").data == b"as it was put first"
    assert second.changed == ()


def test_edited_code_is_taken_by_the_next_start_which_says_so_and_keeps_the_tree_in_force(pinning, tmp_path):
    starter, job = pinning
    first = starter.start(job, SPEC)
    edit(job)
    second = starter.start(job, SPEC)

    for start, said in ((first, "print('old')\n"), (second, "print('new code')\n")):
        assert (tree_of(starter, start.order.code_sha256, tmp_path / "here") / "train.py").read_text() == said
    assert sorted(kept(starter)) == sorted([first.order.code_sha256, second.order.code_sha256])
    assert second.changed == ("the code differs from that of the last start in train.py: the next attempt runs it",)


def test_files_that_were_added_and_removed_are_named_the_first_of_many(pinning):
    starter, job = pinning
    starter.start(job, SPEC)
    for name in ("a.csv", "b.csv", "c\n.csv", "d.csv"):
        (job.code / name).write_text("brought by gpucloud cp\n")
    (job.code / "train.py").unlink()
    where = "in a.csv, b.csv, c .csv and 2 more files"
    assert starter.start(job, SPEC).changed == (
        f"the code differs from that of the last start {where}: the next attempt runs it",
    )


@pytest.mark.parametrize("files", [1, 12_000])
def test_of_the_code_of_before_no_more_is_read_than_lists_its_files(pinning, monkeypatch, files):
    starter, job = pinning
    noise = random.Random(7)
    (job.code / "weights.bin").write_bytes(noise.randbytes(2 << 20))
    for number in range(files - 1):
        (job.code / f"{number}-{noise.getrandbits(128):x}.txt").write_text(str(number))
    starter.start(job, SPEC)
    edit(job)
    got, get = [], starter.store.get
    monkeypatch.setattr(starter.store, "get", lambda key: (got.append(key), get(key))[1])
    told = "the code differs from that of the last start in train.py: the next attempt runs it"
    assert starter.start(job, SPEC).changed == (told,)
    assert any("/control/code/" in key for key in got) is (files > 1)


@pytest.mark.parametrize("kept", [b"", b"[9]\n", b"no tree", b"[4, []]\n[[]]"])
def test_of_code_that_cannot_be_read_any_more_it_is_said_that_it_differs(pinning, kept):
    starter, job = pinning
    first = starter.start(job, SPEC)
    starter.store.put(f"jobs/digits/control/code/{first.order.code_sha256}", kept)
    edit(job)
    assert starter.start(job, SPEC).changed == (
        "the code differs from that of the last start: the next attempt runs it",
    )


def test_a_start_beside_an_attempt_that_trains_says_that_it_goes_on_with_the_script_of_before(pinning):
    starter, job = pinning
    starter.start(job, SPEC)
    put(starter, "digits", attempts=(opened("a"),))
    assert starter.start(job, SPEC).changed == ()
    edit(job)
    _, goes_on = starter.start(job, SPEC).changed
    assert re.fullmatch(
        "attempt 1 goes on as it was started, to the end of its script if nothing interrupts it:"
        " `gpucloud down digits`, then the same start, has the script run as it is now,"
        r" from what is saved by then, else from its beginning; another start needs 0\.\d+ USD of the budget free",
        goes_on,
    )


@pytest.mark.parametrize(
    ("saving", "changes", "deadline", "said"),
    [
        (Saving.RESUME, {}, None, "as it is now, from what is saved by then, else from its beginning; another"),
        (
            Saving.RESUME,
            {"checkpoint": SAVED},
            None,
            "as it is now, from what is saved by then; another start needs ",
        ),
        (Saving.NOTHING, {}, None, "as it is now, from its beginning: nothing of this attempt is saved; another start"),
        (
            Saving.RESUME,
            {},
            timedelta(minutes=1),
            ": too little is left, of the budget or until the deadline, to start",
        ),
    ],
)
def test_what_it_costs_to_have_an_edited_script_run_in_place_of_an_attempt_is_said(
    pinning, saving, changes, deadline, said
):
    starter, job = pinning
    starter = replace(starter, saving=lambda _: saving)
    starter.start(job, SPEC)
    put(starter, "digits", attempts=(opened("a"),), **changes)
    edit(job)
    goes_on = starter.start(replace(job, deadline=deadline), SPEC).changed[-1]
    assert said in goes_on
    assert ("gpucloud down" in goes_on) == (deadline is None)


@pytest.mark.parametrize(
    ("heard", "of_attempt"),
    [
        (
            ConditionKind.TRAINED,
            "attempt 1 has trained as it was started:"
            " the same start, once this run is over, begins a new one with the script as it is now",
        ),
        (ConditionKind.LEFT, None),
    ],
)
def test_of_an_attempt_that_nobody_heard_train_it_is_not_said_that_it_goes_on(pinning, heard, of_attempt):
    starter, job = pinning
    starter = replace(starter, saving=lambda _: Saving.RESUME)
    starter.start(job, SPEC)
    put(starter, "digits", attempts=(opened("a"),), checkpoint=SAVED)
    edit(job)
    code, *rest = starter.start(job, SPEC, check=lambda _: heard).changed
    assert rest == ([of_attempt] if of_attempt else [])
    assert ("the next attempt runs it" in code) == (of_attempt is None)


def test_of_an_outdated_attempt_that_nobody_hears_it_is_said_that_it_may_go_on_and_what_ends_it(pinning):
    starter, job = pinning
    starter = replace(starter, saving=lambda _: Saving.RESUME)
    starter.start(job, SPEC)
    put(starter, "digits", attempts=(opened("a"),), checkpoint=SAVED)
    edit(job)
    said = starter.start(job, SPEC, check=lambda _: ConditionKind.SILENT).changed[-1]
    assert said.startswith(
        "attempt 1, which nobody hears, may go on as it was started, to the end of its script:"
        " `gpucloud down digits`, then the same start, has the script run as it is now, from what is saved by then;"
    )


def test_an_edited_script_that_the_rest_of_the_budget_does_not_start_is_not_said_to_run_in_place_of_an_attempt(pinning):
    starter, job = pinning
    starter.start(job, SPEC)
    spent = interval("a", datetime.now(timezone.utc) - timedelta(hours=30))
    put(starter, "digits", attempts=(opened("a"),), nodes=(spent,))
    edit(job)
    assert (
        starter.start(job, SPEC)
        .changed[-1]
        .endswith(": too little is left, of the budget or until the deadline, to start it as it is now in its place")
    )


def test_a_start_whose_edit_was_taken_back_says_that_the_attempt_runs_that(pinning):
    starter, job = pinning
    first = starter.start(job, SPEC).order
    attempt = replace(opened("a"), script=script_of(first.resolved))
    put(starter, "digits", attempts=(attempt,))
    edit(job)
    edited = starter.start(job, SPEC)
    assert edited.changed[-1].startswith("attempt 1 goes on as it was started")
    orders(starter).give(edited.order, edited.over)
    put(starter, "digits", attempts=(replace(attempt, outdated=True),))
    (job.code / "train.py").write_text("print('old')\n")
    back = starter.start(job, SPEC)
    assert back.changed == (
        "the code differs from that of the last start in train.py: it is that which attempt 1 runs",
    )
    assert not adopt(JobStore(starter.store, "digits").load()[0], None, reruns=back.reruns).attempts[0].outdated


def test_a_job_file_in_the_code_folder_is_no_code_and_is_taken_along(pinning, tmp_path):
    """A script may read it: what is pinned has it as it is now."""
    starter, job = pinning
    job = replace(job, source=job.code / "jobs" / "train.yaml")
    job.source.parent.mkdir()
    job.source.write_bytes(SPEC)
    first = starter.start(job, SPEC)
    dearer = SPEC + b"tags: {a: b}\n"
    job.source.write_bytes(dearer)
    second = starter.start(replace(job, tags=(("a", "b"),)), dearer)
    assert second.changed == ("the job file differs from the one of the last start in tags",)
    there = tree_of(starter, second.order.code_sha256, tmp_path / "here")
    assert (there / "jobs" / "train.yaml").read_bytes() == dearer
    made_of = [recipe(one.order.resolved, f"/code/{one.order.code_sha256}") for one in (first, second)]
    assert made_of[0] == made_of[1]

    edit(job)
    third = starter.start(replace(job, tags=(("a", "b"),)), dearer)
    told = "the code differs from that of the last start in train.py: the next attempt runs it"
    assert third.changed == (*second.changed, told)
    assert recipe(third.order.resolved, f"/code/{third.order.code_sha256}") != made_of[1]


def test_another_yaml_in_the_code_folder_is_code(pinning):
    starter, job = pinning
    starter.start(job, SPEC)
    (job.code / "model.yaml").write_text("layers: 3\n")
    again = starter.start(job, SPEC)
    assert again.changed == ("the code differs from that of the last start in model.yaml: the next attempt runs it",)


@pytest.mark.parametrize(
    ("checkpoint", "running", "saves", "none", "is_lowered"),
    [
        (5, False, Saving.RESUME, False, True),
        (None, True, Saving.RESUME, False, True),  # it may have saved meanwhile
        (None, True, Saving.NOTHING, False, False),
        (5, False, Saving.NONE, True, False),
        (None, False, Saving.RESUME, False, False),
    ],
)
def test_a_resume_is_said_to_be_inexact_only_where_there_may_be_one(
    pinning, checkpoint, running, saves, none, is_lowered
):
    starter, job = pinning
    job = replace(job, checkpoint=replace(job.checkpoint, none=none))
    starter = replace(starter, saving=lambda _: saves)
    starter.start(job, SPEC)
    saved = CheckpointRef(step=checkpoint, sha256="0" * 64) if checkpoint is not None else None
    put(starter, "digits", checkpoint=saved, attempts=(opened("a"),) if running else ())
    edit(job)
    said, *_ = starter.start(job, SPEC).changed  # then, of an attempt that runs, that it goes on without it
    assert ("best effort, not exact" in said) == is_lowered, said


def test_a_start_that_is_refused_takes_no_code_from_the_order_in_force(pinning, monkeypatch):
    """Two starts read the same order; the first one's is in force when the second one is refused."""
    starter, job = pinning
    starter.start(job, SPEC)
    found = current_run(starter.store, "digits", starter.clock)
    (job.code / "train.py").write_text("22")
    wins = starter.start(job, SPEC)
    given = orders(starter).give(wins.order, wins.over)
    monkeypatch.setattr(starting, "current_run", lambda *_: found)
    (job.code / "train.py").write_text("333")
    loses = starter.start(job, SPEC)
    with pytest.raises(OrderChanged):
        orders(starter).give(loses.order, loses.over)

    assert JobStore(starter.store, "digits").code(given.order.code_sha256)


def test_a_start_whose_budget_is_refused_writes_nothing(pinning):
    starter, job = pinning
    starter.start(job, SPEC)
    there = kept(starter)
    edit(job)
    with pytest.raises(PlanRefused):
        starter.start(job, SPEC, Asked(budget_usd=Decimal("0.0000001")))
    assert kept(starter) == there


def test_trees_that_neither_the_order_in_force_nor_the_one_before_names_go(pinning):
    starter, job = pinning
    trees = []
    for text in ("2", "33", "444"):
        (job.code / "train.py").write_text(text)
        trees.append(starter.start(job, SPEC).order)
    JobStore(starter.store, "digits").keep_code_of(trees[1], trees[2])

    assert sorted(kept(starter)) == sorted(order.code_sha256 for order in trees[1:])


def test_of_two_starts_of_a_new_name_the_refused_one_has_ordered_nothing(starter):
    """Both saw no run; what the second one wrote over the first one's order is taken back by whoever made the state."""
    wins = starter.start(JOB, SPEC)
    with pytest.raises(UsageError, match="started elsewhere"):
        starter._create(JOB, b"another", Asked(budget_usd=Decimal(500), keep=True), "digits", 1)
    newest = orders(starter).newest()
    assert (newest.order.budget_usd, newest.order.keep, newest.version) == (Decimal(1), False, wins.over.version)
    assert JobStore(starter.store, "digits").spec() == SPEC


def test_an_order_that_another_start_wrote_over_before_there_was_a_state_is_put_back(starter):
    jobs, own = JobStore(starter.store, "digits"), orders(starter)
    wins = starter.start(JOB, SPEC)
    jobs.put_order(sealed(replace(wins.order, budget_usd=Decimal(500))), wins.over.version)

    assert own.keep_first(wins.over).order.budget_usd == Decimal(1)
    assert own.newest().order.budget_usd == Decimal(1)


def test_a_tree_in_the_store_that_is_another_is_refused(pinning, tmp_path):
    starter, job = pinning
    sha256 = starter.start(job, SPEC).order.code_sha256
    edit(job)
    starter.store.put(f"jobs/digits/control/code/{sha256}", whole_code(job.code, limit=1000).packed)

    with pytest.raises(StoreError, match="is not the tree"):
        tree_of(starter, sha256, tmp_path / "here")


def test_code_that_is_gone_from_the_store_is_one_clear_error(pinning, tmp_path):
    starter, job = pinning
    sha256 = starter.start(job, SPEC).order.code_sha256
    starter.store.delete(f"jobs/digits/control/code/{sha256}")

    with pytest.raises(StoreError, match="is not there"):
        tree_of(starter, sha256, tmp_path / "here")


def test_a_pinned_tree_that_was_edited_here_is_put_right(pinning, tmp_path):
    starter, job = pinning
    sha256 = starter.start(job, SPEC).order.code_sha256
    (tree_of(starter, sha256, tmp_path / "here") / "train.py").write_text("edited")

    assert (tree_of(starter, sha256, tmp_path / "here") / "train.py").read_text() == "print('old')\n"
