"""What lies in a store starts nothing, whoever put it there; it can be shown and ended."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from gpucloud.adapters.home import Home
from gpucloud.adapters.keys import KeyRing
from gpucloud.adapters.local.market import LocalMarket
from gpucloud.adapters.transfer.sync import whole_code
from gpucloud.cli.app import app
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.domain.job.spec import AwsChoices, Cloud, KnownJob, OwnHost, SshChoices
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.launch import recipe
from gpucloud.domain.node.node import NO_GROUP
from gpucloud.domain.state.order import (
    Envelope,
    OrderMark,
    Refusal,
    ending_cloud,
    is_ahead,
    refuse_elsewhere,
    refuse_order,
    sealed,
    with_budget,
)
from gpucloud.domain.state.state import ExitReason, JobStatus
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.store import open_store
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.job.start import Starter
from gpucloud.usecases.jobstore.jobstore import JobStore, job_names
from gpucloud.usecases.jobstore.orders import Orders, Reader
from gpucloud.usecases.jobstore.report import report
from gpucloud.wiring import Gpucloud
from tests.unit.worlds import NOW, job, order, state


@pytest.mark.parametrize(
    ("group", "in_s3", "is_here", "expected"),
    [
        (None, True, False, Cloud.AWS),
        ("eu-west-1/gpucloud-digits", True, False, Cloud.AWS),
        (None, False, False, Cloud.LOCAL),
        ("gpucloud-digits", False, True, Cloud.LOCAL),
        ("gpucloud-digits", False, False, "only its owner"),
        ("gpucloud-digits", True, False, "only its owner"),
        ("eu-west-1/gpucloud-digits", False, False, "only its owner"),
        (f"{'a' * 32}@host/home/me/gpucloud-digits", True, False, "only its owner"),
        (f"{'a' * 32}@host/home/me/gpucloud-digits", False, True, Cloud.LOCAL),
        ("eu-west-1/gpucloud-other", True, False, "not its own"),
        ("gpucloud-other", False, True, "not its own"),
        ("eu-west-1/digits", True, False, "not its own"),
        ("", True, False, "not its own"),
        ("a/b/gpucloud-digits-2", True, False, "not its own"),
    ],
)
def test_an_unsigned_job_is_ended_on_its_own_group_alone(group, in_s3, is_here, expected):
    found = ending_cloud("digits", group, in_s3=in_s3, is_here=is_here)

    assert expected in found.why if isinstance(found, Refusal) else found is expected


def test_to_end_a_job_needs_nobodys_word():
    seen = OrderMark(first_at=NOW, number=9)

    assert refuse_order(order(end=ExitReason.STOPPED), signed_by=None, seen=seen) is None


@pytest.mark.parametrize(
    ("signed_by", "seen", "why"),
    [
        ("own", None, None),
        ("anna", None, None),
        ("own", OrderMark(first_at=NOW, number=5), None),
        ("own", OrderMark(first_at=NOW, number=4), None),
        ("own", OrderMark(first_at=NOW - timedelta(days=1), number=9), None),  # of a run before, by the same name
        (None, None, "signed by nobody you trust"),
        (None, OrderMark(first_at=NOW, number=5), "signed by nobody you trust"),
        ("own", OrderMark(first_at=NOW, number=6), "older than order 6"),
        ("own", OrderMark(first_at=NOW + timedelta(seconds=1), number=1), "older than order 1"),
    ],
)
def test_an_order_is_acted_on_by_who_signed_it_and_never_an_older_one(signed_by, seen, why):
    refusal = refuse_order(order(number=5, first_at=NOW), signed_by=signed_by, seen=seen)

    assert why in refusal.why if why is not None else refusal is None


def test_a_refusal_names_the_key_that_nobody_trusts_and_tells_nothing_that_is_no_fingerprint():
    key = "SHA256:" + "a" * 43
    refusals = [
        refuse_order(order(), signed_by=None, seen=None, key=one) for one in (key, "", "x\x1b[2J", key + " own")
    ]

    assert [one.why.rpartition(" (")[2] for one in refusals] == [f"the key is {key})", *["by no key)"] * 3]


@pytest.mark.parametrize(
    ("changes", "has_file", "why"),
    [
        ({"cloud": Cloud.AWS}, True, None),
        ({"cloud": Cloud.AWS}, False, None),
        ({"cloud": Cloud.AWS, "data": (("s3://b/p", "data"),)}, False, None),
        ({"cloud": Cloud.AWS, "data": (("/home/me/data", "data"),)}, False, "takes its data"),
        ({"cloud": Cloud.AWS, "data": (("/home/me/data", "data"),)}, True, None),
        ({"cloud": Cloud.AWS, "secrets": ("TOKEN",)}, False, "needs TOKEN"),
        ({"cloud": Cloud.AWS, "secrets": ("TOKEN",)}, True, None),
        ({"cloud": Cloud.SSH}, False, "logs in"),
        ({"cloud": Cloud.SSH}, True, None),
        ({"cloud": Cloud.LOCAL}, False, "another machine"),
        ({"cloud": Cloud.LOCAL}, True, "another machine"),
    ],
)
def test_what_an_order_names_of_another_machine_is_not_taken_from_this_one(changes, has_file, why):
    given = order(resolved=job(**changes), host="there", code_sha256="0" * 64)
    refusal = refuse_elsewhere(given, has_file=has_file)

    assert why in refusal.why if why is not None else refusal is None


@pytest.mark.parametrize(
    "changes",
    [
        {"ssh": SshChoices(hosts=(OwnHost(address="-oProxyCommand=x"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a b"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a", user="-l"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a", private_address="-x"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a", interface="eth0\n"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a", jump="-oProxyCommand=x"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a", jump="b, -oProxyCommand=x"),))},
        {"ssh": SshChoices(hosts=(OwnHost(address="a", jump="me@-oProxyCommand=x:22"),))},
        {"aws": AwsChoices(user="-x")},
        {"aws": AwsChoices(image="-x")},
        {"image": "--privileged"},
        {"image": ""},
    ],
)
def test_an_order_that_says_what_no_job_file_can_is_refused_unless_it_ends_the_job(changes):
    given = order(resolved=job(**changes))

    assert "is no name or address" in refuse_order(given, signed_by="anna", seen=None).why
    assert refuse_order(replace(given, end=ExitReason.STOPPED), signed_by="anna", seen=None) is None


@pytest.mark.parametrize("name", ["../../x", "0" * 63, "0" * 64 + "\n"])
def test_an_order_whose_code_has_no_name_of_a_tree_is_refused(name):
    assert "no tree of code" in refuse_order(order(code_sha256=name), signed_by="anna", seen=None).why


def test_what_job_files_say_of_hosts_is_usable():
    host = OwnHost(address="fe80::1", user="me", jump="me@a:22, b,c", interface="eth0", private_address="10.0.0.5")
    usable = job(ssh=SshChoices(hosts=(host, OwnHost(address="gpu1.lab"))), image="ghcr.io/me/x:1@sha256:" + "0" * 64)

    assert refuse_order(order(resolved=usable, code_sha256="0" * 64), signed_by="anna", seen=None) is None


def test_code_in_a_folder_elsewhere_is_not_looked_for_here():
    given = order(resolved=job(cloud=Cloud.AWS), host="there")

    assert "takes its code" in refuse_elsewhere(given, has_file=False).why
    assert refuse_elsewhere(given, has_file=True) is None


@pytest.fixture
def mine(tmp_path):
    return KeyRing(tmp_path / "mine", {})


@pytest.fixture
def stranger(tmp_path):
    return KeyRing(tmp_path / "stranger", {}).signer()


@pytest.fixture
def orders(tmp_path, mine):
    """A job's orders, given and read by one user."""
    jobs = JobStore(open_store(str(tmp_path / "store"), profile=None), "digits")
    signer = mine.signer()
    marks = Home(tmp_path / "home").order_marks
    found = Orders(jobs=jobs, clock=SystemClock(), signer=signer, reader=Reader(trust=mine.trust(), marks=marks))
    found.first(order(jobs.store.url))
    return found


def put(orders, envelope):
    """Write an envelope as somebody does who can write to the store."""
    data = envelope if isinstance(envelope, bytes) else to_json(envelope).encode()
    orders.jobs.store.put("jobs/digits/control/order.json", data)


def signed(order, signer):
    return sealed(order, signer.key_id, signer.sign(sealed(order).signed))


def test_the_own_order_is_acted_on(orders):
    assert orders.acted_on().order.number == 1
    assert orders.change(lambda newest: replace(newest, drill=True)).order.number == 2
    assert orders.acted_on().order.drill


def test_an_order_of_somebody_trusted_is_acted_on_until_he_is_not(orders, mine, stranger):
    put(orders, signed(replace(orders.newest().order, number=2, by="anna@laptop"), stranger))
    with pytest.raises(CredentialsError, match="signed by nobody you trust") as refused:
        orders.acted_on()
    assert stranger.key_id in refused.value.message

    mine.add("anna", stranger.line)
    trusting = replace(orders, reader=replace(orders.reader, trust=mine.trust()))
    assert trusting.acted_on().order.number == 2

    mine.revoke("anna")
    with pytest.raises(CredentialsError, match="signed by nobody you trust"):
        replace(orders, reader=replace(orders.reader, trust=mine.trust())).acted_on()


def hostile_envelopes(orders, stranger):
    newest = orders.newest()
    richer = replace(newest.order, number=7, budget_usd=Decimal(500))
    text = newest.envelope.order
    yield "unsigned", sealed(richer)
    yield "a stranger's", signed(richer, stranger)
    yield "a stranger's under the own key's name", replace(signed(richer, stranger), key=newest.envelope.key)
    yield "the own signature under another order", replace(newest.envelope, order=to_json(richer))
    yield "one byte more", replace(newest.envelope, order=text + " ")
    yield "the same order written otherwise", replace(newest.envelope, order=json.dumps(json.loads(text), indent=1))
    yield "no signature", replace(newest.envelope, signature="")
    yield "no key", replace(newest.envelope, key="")
    yield "no base64", replace(newest.envelope, signature="\x00\u2028")
    yield "half a signature", replace(newest.envelope, signature=newest.envelope.signature[:40])
    yield "not JSON", b"\x00\xff" * 100
    yield "nothing", b""
    yield "nested", b"[" * 100_000
    yield "another shape", b'{"order": {"number": 3}, "key": 1}'
    yield "an order that is none", Envelope(order="[]", key=newest.envelope.key, signature=newest.envelope.signature)
    yield "no number", replace(newest.envelope, order=text.replace('"number":1', '"number":"x"'))
    yield "another version", signed(replace(richer, version=99), orders.signer)
    yield "another job's", signed(replace(richer, job="other"), orders.signer)
    yield "another store's", signed(replace(richer, store="s3://elsewhere"), orders.signer)
    yield "huge", b'{"order": "' + b"x" * (64 << 20) + b'"}'


def test_no_hostile_order_is_acted_on_changed_or_signed_anew(orders, stranger):
    for what, envelope in hostile_envelopes(orders, stranger):
        put(orders, envelope)
        with pytest.raises((CredentialsError, StoreError)):
            orders.acted_on()
        with pytest.raises((CredentialsError, StoreError)):
            orders.change(lambda newest: with_budget(newest, Decimal(600)))
        written = (orders.jobs.store.root / "jobs/digits/control/order.json").read_bytes()
        assert written == (envelope if isinstance(envelope, bytes) else to_json(envelope).encode()), what


def test_an_older_order_that_is_put_back_is_not_acted_on_again(orders):
    first = orders.newest().envelope
    orders.change(lambda newest: with_budget(newest, Decimal(0)))
    put(orders, first)

    with pytest.raises(CredentialsError, match="older than order 2"):
        orders.acted_on()
    with pytest.raises(CredentialsError, match="older than order 2"):
        orders.change(lambda newest: replace(newest, drill=True))


def test_a_start_over_an_order_that_was_put_back_takes_the_files_budget_and_comes_after_all_that_was_ordered(
    tmp_path, orders
):
    """Somebody with a larger budget in an older order of the user's own would have it paid by the next `train`."""
    jobs = orders.jobs
    file = job(budget_usd=Decimal(1))
    jobs.create(state(job="digits", group=None))
    generous = orders.change(lambda one: with_budget(replace(one, resolved=file), Decimal(5)))
    orders.change(lambda one: with_budget(one, Decimal("0.5")))
    newest = orders.newest().order.number
    jobs.put_order(generous.envelope, jobs.order()[1])
    starter = Starter(
        store=jobs.store,
        market=LocalMarket(),
        account=None,
        clock=SystemClock(),
        rules=Rules(),
        terms=Terms(),
        signer=orders.signer,
        reader=orders.reader,
    )

    start = starter.start(replace(file, name="digits"), b"name: digits\n")
    given = orders.give(start.order, start.over)

    assert (given.order.budget_usd, given.order.number) == (Decimal(1), newest + 1)
    assert any("was put back" in line for line in start.changed)
    assert orders.acted_on().order.number == newest + 1


def test_of_an_order_that_nobody_signed_and_that_has_ended_nothing_else_is_changed(orders):
    """A budget that is changed there would be said to hold, and the next start would not take it."""
    ended = sealed(replace(orders.newest().order, end=ExitReason.STOPPED, budget_usd=Decimal(50)))
    orders.jobs.put_order(ended, orders.jobs.order()[1])

    with pytest.raises(CredentialsError, match="signed by nobody you trust"):
        orders.change(lambda one: with_budget(one, Decimal("0.4")))
    assert orders.end().order.end is ExitReason.STOPPED


def test_the_mark_of_the_newest_order_only_rises_whatever_is_put_back(orders):
    """An end is acted on whoever put it back, and an older one brings no order between the two back to life."""
    first = orders.newest().envelope
    ended = orders.end().envelope
    again = orders.change(lambda newest: replace(newest, end=None, budget_usd=Decimal(500))).envelope
    lowered = orders.change(lambda newest: with_budget(newest, Decimal(5))).envelope

    put(orders, ended)
    found = orders.acted_on().order
    assert (found.end, found.budget_usd, found.keep) == (ExitReason.STOPPED, 0, False)
    for older in (again, first):
        put(orders, older)
        with pytest.raises(CredentialsError, match="older than order 4"):
            orders.acted_on()
    put(orders, lowered)
    assert orders.acted_on().order.budget_usd == 5


def test_of_two_processes_the_slower_one_does_not_set_the_mark_back(orders, tmp_path):
    here, other = (Home(tmp_path / "home").order_marks for _ in range(2))
    marks = [OrderMark(first_at=NOW, number=number) for number in (2, 3, 1)]
    for one, mark in zip((other, here, other), marks, strict=True):
        one.raise_to("s", "digits", mark)
    assert here.seen("s", "digits") == marks[1]
    newer_run = OrderMark(first_at=NOW + timedelta(seconds=1), number=1)
    here.raise_to("s", "digits", newer_run)
    assert other.seen("s", "digits") == newer_run


def test_nothing_but_the_end_of_an_unsigned_order_counts(orders, stranger):
    rich = {"number": 9, "budget_usd": Decimal(10**6), "keep": True, "drill": True}
    put(orders, sealed(replace(orders.newest().order, end=ExitReason.SUCCEEDED, **rich)))

    found = orders.acted_on().order
    assert (found.end, found.budget_usd, found.keep, found.drill) == (ExitReason.STOPPED, 0, False, False)


def test_an_older_order_is_told_by_whoever_only_read_the_newer_one(orders, tmp_path):
    first = orders.newest().envelope
    second = orders.change(lambda newest: with_budget(newest, Decimal(3))).envelope
    ci = replace(orders, signer=None, reader=replace(orders.reader, marks=Home(tmp_path / "ci").order_marks))
    put(orders, first)
    assert ci.acted_on().order.number == 1  # a runner that is new cannot know
    put(orders, second)
    assert ci.acted_on().order.number == 2
    put(orders, first)

    with pytest.raises(CredentialsError, match="older than order 2"):
        ci.acted_on()


def test_an_unsigned_order_can_be_ended_and_stays_unsigned(orders, stranger):
    put(orders, signed(replace(orders.newest().order, number=2), stranger))

    ended = orders.end()

    assert ended.order.end is ExitReason.STOPPED
    assert (ended.envelope.key, ended.envelope.signature) == (stranger.key_id, "")  # whose run it was is still told
    assert not orders.is_trusted(ended)
    assert orders.acted_on().order.end is ExitReason.STOPPED
    with pytest.raises(CredentialsError, match="signed by nobody you trust \\(by no key\\)"):
        orders.change(lambda newest: replace(newest, end=None))


FUTURE = datetime(2090, 12, 31, tzinfo=timezone.utc)


@pytest.mark.parametrize("end", [None, ExitReason.STOPPED])
@pytest.mark.parametrize("of_future", [{"first_at": FUTURE}, {"at": FUTURE}, {"first_at": FUTURE, "at": FUTURE}])
def test_anothers_order_of_the_future_locks_nobody_out_of_the_job(orders, mine, stranger, of_future, end):
    before = orders.newest().order
    mine.add("anna", stranger.line)
    trusting = replace(orders, reader=replace(orders.reader, trust=mine.trust()))
    put(orders, signed(replace(before, number=2, end=end, budget_usd=Decimal(9), **of_future), stranger))
    if end is None:
        with pytest.raises(CredentialsError, match="signed by anna, says that it was given in the future"):
            trusting.acted_on()
        with pytest.raises(CredentialsError, match="in the future"):
            trusting.change(lambda newest: with_budget(newest, Decimal(600)))
    else:
        assert (trusting.acted_on().order.end, trusting.acted_on().order.budget_usd) == (ExitReason.STOPPED, 0)

    trusting.give(before, trusting.newest())

    assert (trusting.acted_on().order.first_at, trusting.acted_on().order.number) == (before.first_at, 3)


@pytest.mark.parametrize(("late", "ahead"), [(timedelta(minutes=4), False), (timedelta(minutes=6), True)])
def test_clocks_may_differ_by_some_minutes(late, ahead):
    assert is_ahead(order(first_at=NOW + late), NOW) is ahead
    assert is_ahead(order(at=NOW + late), NOW) is ahead


@pytest.mark.parametrize("put_back", [1, 2])
def test_a_start_over_an_order_that_was_put_back_comes_after_the_newest_that_was_here(orders, put_back):
    """Its number would else be one that was there, and the user's own order would count as put back."""
    envelopes = [orders.newest().envelope]
    envelopes += [orders.change(lambda newest, n=n: with_budget(newest, Decimal(n))).envelope for n in (2, 3, 4)]
    put(orders, envelopes[put_back])
    looked = orders.newest()

    orders.give(replace(looked.order, drill=True), looked)

    assert (orders.acted_on().order.number, orders.acted_on().order.drill) == (5, True)


def test_a_start_over_an_order_of_a_run_before_comes_after_the_newer_run(orders):
    first = orders.newest()
    orders.reader.marks.raise_to(orders.jobs.store.url, "digits", OrderMark(first_at=NOW, number=7))

    orders.give(replace(first.order, drill=True), first)

    assert (orders.acted_on().order.number, orders.acted_on().order.first_at) == (8, NOW)


def test_a_start_over_a_strangers_order_is_the_users_own(orders, stranger):
    put(orders, signed(orders.newest().order, stranger))
    looked = orders.newest()

    given = orders.give(looked.order, looked)

    assert orders.is_trusted(given)
    assert orders.acted_on().order.number == 2


def test_a_reader_who_reads_while_an_order_is_given_takes_it_for_no_older_one(orders, monkeypatch):
    real, given = JobStore.order, []

    def slow(self):
        found = real(self)
        if not given:
            given.append(True)
            orders.change(lambda newest: replace(newest, drill=True))
        return found

    reader = replace(orders, signer=None)
    monkeypatch.setattr(JobStore, "order", slow)

    assert reader.acted_on().order.number == 1
    assert reader.acted_on().order.number == 2


@pytest.fixture
def reconciled(tmp_path, monkeypatch):
    """Puts a job into a store as somebody could who writes there, and makes a pass over it as a CI runner does."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DEPLOY_TOKEN", "ci-secret-123456")
    for name in ("GPUCLOUD_SIGNING_KEY", "GPUCLOUD_TRUSTED_KEYS", "GPUCLOUD_SSH_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    jobs = JobStore(open_store(str(tmp_path / "store"), profile=None), "digits")
    jobs.keep_spec(b"name: digits\nbudget: 100USD\nrun: true\n")

    def run(resolved, signer=None, host="elsewhere", **changes):
        found = order(jobs.store.url, resolved=resolved, host=host, budget_usd=Decimal(100))
        jobs.put_order(sealed(found) if signer is None else signed(found, signer), None)
        jobs.create(state(**changes))
        words = ["reconcile", "--all", "--store", jobs.store.url, "--json"]
        answer = CliRunner().invoke(app, words, standalone_mode=False)
        return answer.return_value if answer.exit_code == 0 else answer.exit_code, json.loads(answer.stdout)["jobs"]

    return run


def hostile(tmp_path, **changes):
    run = f"sh -c 'id > {tmp_path}/ran'"
    return job(run=run, secrets=("DEPLOY_TOKEN",), code=tmp_path, source=tmp_path / "a.yaml", **changes)


@pytest.mark.parametrize("by_stranger", [True, False])
@pytest.mark.parametrize("cloud", list(Cloud))
def test_an_order_that_nobody_trusted_signed_starts_nothing(reconciled, tmp_path, stranger, by_stranger, cloud):
    signer = stranger if by_stranger else None
    host = Home(tmp_path / "home").identity  # it may say that it was given here

    code, jobs = reconciled(hostile(tmp_path, cloud=cloud), signer, host, group=None, paid_until=None)

    assert code == 3
    assert "signed by nobody you trust" in jobs[0]["message"]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "home" / "cloud").exists()


@pytest.mark.parametrize("cloud", [Cloud.LOCAL, Cloud.SSH, Cloud.AWS])
def test_a_friends_order_that_says_it_was_given_here_takes_nothing_of_this_machine(reconciled, tmp_path, cloud):
    """Whose machine it was given on is the signer's word; the reader's identity stands in each of his own orders."""
    friend = KeyRing(tmp_path / "friend", {}).signer()
    KeyRing(tmp_path / "home" / "signing", {}).add("friend", friend.line)

    code, jobs = reconciled(hostile(tmp_path, cloud=cloud), friend, Home(tmp_path / "home").identity, group=None)

    assert code == 3
    assert "of another machine" in jobs[0]["message"]
    assert not (tmp_path / "ran").exists()


def test_the_job_file_being_here_makes_nobodys_order_the_users(reconciled, tmp_path):
    (tmp_path / "here" / "gpucloud.yaml").write_bytes(b"name: digits\nbudget: 100USD\nrun: true\n")

    code, jobs = reconciled(hostile(tmp_path), group=None, paid_until=None)

    assert code == 3
    assert "signed by nobody you trust" in jobs[0]["message"]


@pytest.mark.parametrize("says_here", [False, True])
def test_a_trusted_order_for_another_machine_is_not_taken_for_this_one(reconciled, tmp_path, says_here):
    """Whatever it says: the name of this machine stands in each of its own orders, for whoever reads the store."""
    friend = KeyRing(tmp_path / "friend", {}).signer()
    KeyRing(tmp_path / "home" / "signing", {}).add("friend", friend.line)
    host = Home(tmp_path / "home").identity if says_here else "elsewhere"

    code, jobs = reconciled(hostile(tmp_path), friend, host, group=None, paid_until=None)

    assert code == 3
    assert "another machine" in jobs[0]["message"]
    assert not (tmp_path / "ran").exists()


def by_anna(here, known, anna, **changes):
    """Put an order of hers there that says it was given here, and names what this machine has."""
    orders = here.orders(known)
    newest = orders.newest()
    named = replace(newest.order.resolved, **changes)
    put(orders, signed(replace(newest.order, number=2, host=here.home.identity, resolved=named), anna))
    return orders.acted_on()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": (("/home/me/private", "data"),)}, "takes its data"),
        ({"secrets": ("DEPLOY_TOKEN",)}, "needs DEPLOY_TOKEN"),
        ({"cloud": Cloud.SSH}, "logs in"),
    ],
)
def test_anothers_order_that_says_it_was_given_here_takes_nothing_of_this_machine(elsewhere, tmp_path, changes, why):
    cloud, known, _ = elsewhere
    given = by_anna(cloud, known, KeyRing(tmp_path / "anna", {}).signer(), **changes)

    with pytest.raises(CredentialsError, match=why):
        cloud.ordered(known).to_go_on(given)


def test_anothers_job_is_looked_at_and_ended_without_keys_of_this_machine(elsewhere, tmp_path, monkeypatch):
    cloud, known, _ = elsewhere
    known = replace(known, cloud=Cloud.SSH)
    theirs = {"ssh": SshChoices(hosts=(OwnHost(address="a"),), key=tmp_path / "id"), "secrets": ("DEPLOY_TOKEN",)}
    given = by_anna(cloud, known, KeyRing(tmp_path / "anna", {}).signer(), cloud=Cloud.SSH, **theirs)
    looked_at = []
    monkeypatch.setattr(cloud, "cloud", lambda job: looked_at.append(job.ssh))
    cloud.cloud_of(known)

    ended, _ = cloud.ordered(known).to_end(given)

    assert looked_at == [ended.ssh] == [SshChoices(hosts=(OwnHost(address="a"),))]
    assert (ended.secrets, ended.code) == ((), known.file.parent)


def test_the_job_file_here_says_which_hosts_and_keys_of_this_machine_anothers_order_goes_by(elsewhere, tmp_path):
    cloud, known, _ = elsewhere
    known.file.parent.mkdir()
    known.file.write_text("name: digits\nbudget: 1USD\nrun: train.py\ncloud: aws\nsecrets: [MINE]\n")
    (known.file.parent / "train.py").touch()
    given = by_anna(cloud, known, KeyRing(tmp_path / "anna", {}).signer(), secrets=("DEPLOY_TOKEN",))

    assert cloud.ordered(known).to_go_on(given)[0].secrets == ("MINE",)


@pytest.mark.parametrize("owned", [cloud for cloud in Cloud if cloud.traits.owned])
def test_anothers_order_names_no_host_where_the_job_file_is_here(elsewhere, tmp_path, owned):
    cloud, known, _ = elsewhere
    known.file.parent.mkdir()
    known.file.write_text(
        f"name: digits\nbudget: 1USD\nrun: train.py\ncloud: {owned.value}\n"
        f"{owned.traits.section}: {{hosts: [me@10.0.0.1]}}\n"
    )
    (known.file.parent / "train.py").touch()
    theirs = SshChoices(hosts=(OwnHost(user="me", address="10.0.0.66"),))
    given = by_anna(cloud, known, KeyRing(tmp_path / "anna", {}).signer(), **{owned.traits.section: theirs})
    found = cloud.ordered(known).to_go_on(given)[0]
    assert [host.address for host in getattr(found, owned.traits.section).hosts] == ["10.0.0.1"]


def test_a_listed_key_that_is_called_own_is_not_the_own_one(mine, stranger, tmp_path):
    ring = KeyRing(tmp_path / "home" / "signing", {"GPUCLOUD_TRUSTED_KEYS": f"{stranger.line} own"})

    assert ring.trust().verify(b"x", stranger.key_id, stranger.sign(b"x")) == "environment-1"


def test_the_state_of_another_jobs_group_ends_nothing(reconciled, tmp_path):
    code, jobs = reconciled(hostile(tmp_path), group="gpucloud-other", status=JobStatus.FAILED)

    assert code == 15
    assert "another job's" in jobs[0]["message"]


def test_an_unsigned_job_that_has_ended_is_torn_down(reconciled, tmp_path):
    code, jobs = reconciled(hostile(tmp_path), group=None, paid_until=None, status=JobStatus.FAILED)

    assert (code, jobs[0]["status"]) == (0, "failed")
    assert not (tmp_path / "ran").exists()


def test_names_that_no_job_can_have_are_no_jobs(tmp_path):
    store = open_store(str(tmp_path), profile=None)
    for name in ("digits", "digits-2", "UP", "a b", "x" * 64, "-x", "\x1b]0;x\x07"):
        store.put(f"jobs/{name}/state.json", b"{}")

    assert sorted(job_names(store)) == ["digits", "digits-2"]


@pytest.mark.parametrize(
    "changes",
    [{"job": "other"}, {"group": "gpucloud-other"}, {"group": "eu-west-1/gpucloud-other"}, {"group": "digits"}],
)
def test_the_state_of_another_job_is_nobodys(tmp_path, changes):
    jobs = JobStore(open_store(str(tmp_path), profile=None), "digits")
    jobs.create(state(**changes))

    with pytest.raises(StoreError, match="another job's"):
        jobs.load()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A machine without the job's file, and an order for it that another one gave, signed by a key trusted here."""
    for name in ("GPUCLOUD_SIGNING_KEY", "GPUCLOUD_SSH_KEY", "GPUCLOUD_TRUSTED_KEYS"):
        monkeypatch.delenv(name, raising=False)
    there = tmp_path / "there"
    there.mkdir()
    (there / "train.py").write_text("as it was started")
    anna = KeyRing(tmp_path / "anna", {}).signer()
    cloud = Gpucloud(Home(tmp_path / "home"))
    cloud.keys().add("anna", anna.line)
    jobs = JobStore(open_store(str(tmp_path / "store")), "digits")
    whole = whole_code(there, limit=1000)
    sha256, packed = whole.sha256, whole.packed
    jobs.keep_code(sha256, packed)
    of_anna = replace(
        order(jobs.store.url, host="there", code_sha256=sha256), resolved=job(code=there, cloud=Cloud.AWS)
    )
    jobs.put_order(signed(of_anna, anna), None)
    file = tmp_path / "nowhere" / "gpucloud.yaml"
    return cloud, KnownJob(name="digits", store=jobs.store.url, file=file, cloud=Cloud.AWS), there


def test_a_trusted_order_is_gone_on_with_elsewhere_by_its_pinned_code_without_its_folder(elsewhere):
    cloud, known, there = elsewhere
    (there / "train.py").write_text("edited since")

    found, edited = cloud.ordered(known).to_go_on(cloud.orders(known).acted_on())

    assert (found.code / "train.py").read_text() == "as it was started"
    assert edited is None


def test_whoever_goes_on_with_a_job_knows_its_code_as_its_order_does(elsewhere):
    """A start takes the job as its file says, which knows nothing of code."""
    cloud, known, there = elsewhere
    (there / "gpucloud.yaml").write_text("name: digits")
    whole = whole_code(there, limit=1000, apart="gpucloud.yaml")
    newest = cloud.orders(known).acted_on().order
    cloud.orders(known).jobs.keep_code(whole.sha256, whole.packed)
    resolved = replace(newest.resolved, own_code_sha256=whole.own_sha256)
    pinned = replace(newest, code_sha256=whole.sha256, resolved=resolved)

    found = cloud.ordered(known).with_pinned_code(job(code=there), pinned)

    assert whole.own_sha256 == newest.code_sha256 != whole.sha256
    assert (found.code / "gpucloud.yaml").is_file()
    assert json.loads(recipe(found, str(found.code)))["code"] == newest.code_sha256[:12]


def test_a_checkout_that_differs_does_not_change_what_a_trusted_order_runs(elsewhere):
    cloud, known, _ = elsewhere
    known.file.parent.mkdir()
    known.file.write_text("name: digits\nbudget: 1USD\nrun: train.py\ncloud: aws\n")
    (known.file.parent / "train.py").write_text("another checkout")

    found, edited = cloud.ordered(known).to_go_on(cloud.orders(known).acted_on())

    assert (found.code / "train.py").read_text() == "as it was started"
    assert "its order 1 counts" in edited


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("anna", "its order is signed by anna"),
        (
            None,
            "its newest order is signed by nobody you trust, or an older one was put back:"
            " `gpucloud train` gives your own, `gpucloud down` ends it, both with `--adopt` where it is another's",
        ),
    ],
)
def test_a_report_says_whose_key_signed_the_order(name, said):
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    told = replace(report(state(), spend, (), NO_GROUP, None), signed_by=name)

    assert said in report_text(told).splitlines()
    assert report_json(told)["signed_by"] == name
    own = replace(told, signed_by="own")
    assert "signed" not in report_text(own)
    assert report_json(own)["signed_by"] == "own"


def test_whose_key_signed_is_told_by_name_and_a_strangers_as_nobodys(orders, mine, stranger):
    assert orders.signed_by(orders.newest()) == "own"
    put(orders, signed(replace(orders.newest().order, number=2), stranger))
    assert orders.signed_by(orders.newest()) is None
    mine.add("anna", stranger.line)
    assert replace(orders, reader=replace(orders.reader, trust=mine.trust())).signed_by(orders.newest()) == "anna"
