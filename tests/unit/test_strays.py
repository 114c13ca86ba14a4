"""What is a stray and what is not, and when it may be removed: rules over values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.cli.commands.machines import Sweep, gc
from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError, StoreError, UsageError
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.supervision.strays import Claim, Owner, Thing, claim, is_owned, ripe, sighted, strays
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.machines import Sweeper
from gpucloud.wiring import found as found_module
from gpucloud.wiring.found import Unasked, sweepers
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, POOL, state

OWNER = Owner(account="123456789012", store="s3://jobs")
TAGS = {
    "gpucloud:managed": "true",
    "gpucloud:cluster": "gpucloud-digits",
    "gpucloud:job": "digits",
    "gpucloud:store": "s3://jobs",
}


def thing(name="i-1", kind="instance", region="us-east-2", account="123456789012", **tags):
    tags = {key.replace("_", ":"): value for key, value in tags.items()}
    return Thing(kind=kind, id=name, account=account, region=region, tags=tuple({**TAGS, **tags}.items()))


def test_what_bears_every_tag_to_the_letter_and_is_no_living_jobs_is_a_stray():
    assert strays((thing(),), (), OWNER) == (thing(),)
    assert strays((thing(),), (Claim(cluster="gpucloud-digits", regions=None),), OWNER) == ()


@pytest.mark.parametrize(
    "other",
    [
        thing(account="210987654321"),
        thing(gpucloud_managed="True"),
        thing(gpucloud_managed=""),
        thing(gpucloud_store="s3://jobs/other"),
        thing(gpucloud_job="digit"),
        thing(gpucloud_cluster="digits"),
        thing(gpucloud_cluster="gpucloud-", gpucloud_job=""),
        thing(gpucloud_cluster="Gpucloud-digits"),
        replace(thing(), tags=(("gpucloud:cluster", "gpucloud-digits"),)),
        replace(thing(), tags=()),
        replace(thing(), tags=tuple((key.upper(), value) for key, value in TAGS.items())),
    ],
)
def test_a_look_alike_and_what_is_anothers_is_no_stray(other):
    assert not is_owned(other, OWNER)
    assert strays((other,), (), OWNER) == ()


def test_a_living_job_has_the_region_of_its_pool_and_of_its_group_and_no_other():
    moving = state(group="eu-west-1/gpucloud-digits", pool=replace(POOL, zone="us-east-2a"))
    living = claim("gpucloud-digits", moving, regional=True)

    assert living is not None
    assert [living.covers(thing(region=region)) for region in ("us-east-2", "eu-west-1", "us-west-2")] == [
        True, True, False,
    ]  # fmt: skip
    assert not living.covers(thing(gpucloud_cluster="gpucloud-digits-2"))


def test_a_job_that_is_torn_down_or_was_never_there_has_nothing():
    assert claim("gpucloud-digits", state(torn_down=True), regional=True) is None
    assert claim("gpucloud-digits", None, regional=True) is None


def test_a_stray_keeps_its_first_sighting_until_it_is_none_any_more():
    before = {thing().key: NOW - timedelta(hours=1), thing("i-2").key: NOW}

    assert sighted((thing(), thing("i-3")), before, NOW) == {
        thing().key: NOW - timedelta(hours=1),
        thing("i-3").key: NOW,
    }


def test_a_cluster_may_be_removed_when_all_of_it_was_seen_a_minute_ago():
    both, first = (thing("i-1"), thing("i-2")), {thing("i-1").key: NOW - timedelta(seconds=60)}

    assert ripe(both, {**first, thing("i-2").key: NOW - timedelta(seconds=59)}, NOW) == ()
    (found,) = ripe(both, {**first, thing("i-2").key: NOW - timedelta(seconds=60)}, NOW)
    assert (found.cluster, found.region, found.things) == ("gpucloud-digits", "us-east-2", both)


def test_a_sighting_in_the_future_is_one_of_now():
    later = {thing().key: NOW + timedelta(hours=1)}

    assert sighted((thing(),), later, NOW) == {thing().key: NOW}


@dataclass
class Account:
    """A census that lists the same for every store, as a cloud does."""

    there: tuple[Thing, ...]
    account: str = OWNER.account
    regional: bool = True
    regions: tuple[str, ...] = ("us-east-2",)

    def things(self):
        return self.there


def left_alone(monkeypatch, capsys, stores):
    """Return what `gc` says of things that are no stray of the stores that it knows."""
    clock = JumpingClock(NOW)
    mine, theirs, untagged = thing("i-1"), thing("i-2", gpucloud_store="s3://theirs"), replace(thing("i-3"), tags=())
    seen = SimpleNamespace(load=lambda owner: {}, save=lambda owner, first_seen: None)
    sweepers = []
    for url in stores:
        store = MemoryStore(clock)
        store.url = url
        census = Account((mine, theirs, untagged))
        sweepers.append(Sweeper(census=census, store=store, clock=clock, sightings=seen, story=lambda _: None))
    monkeypatch.setattr("gpucloud.cli.commands.machines.Gpucloud", lambda: None)
    monkeypatch.setattr("gpucloud.cli.commands.machines.sweepers", lambda *_: sweepers)
    monkeypatch.setattr("gpucloud.cli.commands.machines.swept_clouds", lambda *_: (Cloud.LOCAL, Cloud.AWS))
    gc(Sweep(), as_json=False)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("left alone")]


def test_what_one_store_that_was_looked_at_has_is_foreign_to_none_and_each_thing_is_counted_once(monkeypatch, capsys):
    end = "of clusters of other stores, or not tagged to the letter"
    assert left_alone(monkeypatch, capsys, ["s3://jobs"]) == [f"left alone: 2 things {end}"]
    assert left_alone(monkeypatch, capsys, ["s3://jobs", "s3://new"]) == [f"left alone: 2 things {end}"]
    assert left_alone(monkeypatch, capsys, ["s3://jobs", "s3://theirs"]) == [f"left alone: 1 thing {end}"]


def looks(*places):
    """Sweepers of which each finds nothing at an account and its regions, or the profile and error of one."""
    memory = SimpleNamespace(load=lambda _owner: {}, save=lambda _owner, _seen: None)
    store = MemoryStore(JumpingClock(NOW))
    store.url = "s3://jobs"
    return [
        one
        if isinstance(one, Unasked)
        else Sweeper(census=Account((), *one), store=store, clock=JumpingClock(NOW), sightings=memory, story=print)
        for one in places
    ]


FLEET = ("embedded", False, ())
LAPSED = Unasked("old", CredentialsError("the token has expired", hint="aws sso login"))


@pytest.mark.parametrize(
    ("asked", "found", "code", "said"),
    [
        (
            Sweep(),
            [FLEET],
            0,
            ["looked at: the embedded fleet; AWS was not asked, no job known here ran there (--cloud aws asks)"],
        ),
        (
            Sweep(clouds=(Cloud.AWS,)),
            [("1", True, ("us-east-1", "eu-west-1")), ("1", True, ("us-east-1", "eu-west-1")), ("2", True, ("eu-1",))],
            0,
            ["looked at: AWS 1 in us-east-1, eu-west-1, AWS 2 in eu-1 (--region asks elsewhere)"],
        ),
        (
            Sweep(clouds=(Cloud.LOCAL,)),
            [FLEET],
            0,
            ["looked at: the embedded fleet"],
        ),  # who names one leaves others out
        (
            Sweep(clouds=(Cloud.LOCAL, Cloud.AWS)),
            [FLEET, LAPSED],
            CredentialsError.exit_code,
            [
                "looked at: the embedded fleet",
                "NOT LOOKED AT: AWS by profile old: the token has expired",
            ],
        ),
    ],
)
def test_gc_says_in_which_accounts_and_regions_it_looked_and_who_was_not_asked(
    tmp_path, monkeypatch, capsys, asked, found, code, said
):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    monkeypatch.setattr("gpucloud.cli.commands.machines.sweepers", lambda *_: looks(*found))
    assert gc(asked, as_json=False) == code
    written = capsys.readouterr()
    assert written.out == "no strays\n"
    assert written.err.splitlines() == said


def test_gc_answers_where_it_looked_in_json_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    found = looks(FLEET, ("1", True, ("us-east-1",)), LAPSED)
    monkeypatch.setattr("gpucloud.cli.commands.machines.sweepers", lambda *_: found)
    gc(Sweep(clouds=(Cloud.LOCAL, Cloud.AWS)), as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["looked_at"] == [
        {"cloud": "local", "account": None, "regions": []},
        {"cloud": "aws", "account": "1", "regions": ["us-east-1"]},
    ]
    assert [(one["profile"], one["error"]) for one in answer["unread"]] == [("old", LAPSED.error.code)]


def test_an_account_is_looked_at_once_wherever_its_jobs_had_machines_whatever_their_files_say_now(
    tmp_path, monkeypatch
):
    """The file of a job that ran in eu-west-1 is gone, and two profiles lead to one account."""
    stores = {}
    home = SimpleNamespace(
        known=lambda: tuple(
            KnownJob(name=name, store=f"s3://{name}", file=tmp_path / name, cloud=Cloud.AWS, profile=profile)
            for name, profile in (("mine", None), ("same", "work"), ("other", "lab"), ("lapsed", "old"))
        )
    )
    accounts = {None: "1", "work": "1", "lab": "2"}
    for name, zone in (("mine", "eu-west-1a"), ("same", "us-west-2b"), ("other", "no-such-place-1a")):
        stores[name] = MemoryStore(JumpingClock(NOW))
        JobStore(stores[name], name).create(state(job=name, pool=replace(POOL, zone=zone)))
    stores["lapsed"] = MemoryStore(JumpingClock(NOW))

    def aws(choices, resources):
        def caller():
            if choices.profile == "old":
                raise LAPSED.error
            return SimpleNamespace(account=accounts[choices.profile])

        return SimpleNamespace(
            profile=choices.profile,
            regions=resources.regions,
            aws=SimpleNamespace(region="us-east-1", knows_region=True),
            catalog=SimpleNamespace(regions=("us-east-1", "us-west-2", "eu-west-1")),
            account=lambda: SimpleNamespace(caller=caller),
            default_store=lambda: "s3://own",
            census=lambda store: Account((), accounts[choices.profile], True, resources.regions),
        )

    def read_job(file):
        raise UsageError(f"{file} is gone")

    cloud = SimpleNamespace(
        home=SimpleNamespace(known=home.known, sightings=tmp_path / "seen", require_same=lambda store, _: store),
        clock=JumpingClock(NOW),
        aws=aws,
        read_job=read_job,
        store_of=lambda known: stores[known.name],
    )
    opened = {}
    monkeypatch.setattr(
        found_module, "open_store", lambda url, profile: opened.setdefault(url, SimpleNamespace(url=url, by=profile))
    )
    found = list(sweepers(cloud, (Cloud.AWS,), None, (), print))

    assert [one.profile for one in found if isinstance(one, Unasked)] == ["old"]
    assert [
        (one.census.account, one.store.url, one.census.regions) for one in found if not isinstance(one, Unasked)
    ] == [
        ("1", "s3://own", ("us-east-1", "eu-west-1", "us-west-2")),
        ("1", "s3://mine", ("us-east-1", "eu-west-1", "us-west-2")),
        ("1", "s3://same", ("us-east-1", "eu-west-1", "us-west-2")),
        ("2", "s3://own", ("us-east-1",)),
        ("2", "s3://other", ("us-east-1",)),
    ]


def test_own_hosts_have_no_strays(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"own hosts have no strays: .* stays in ~/\.gpucloud") as refused:
        gc(Sweep(clouds=(Cloud.SSH,)), as_json=False)
    assert refused.value.hint == "`rm -r ~/.gpucloud` on a host that no job uses any more"


def test_who_sweeps_aws_without_a_region_is_told_of_the_commands_own_option(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no AWS region is known") as refused:
        gc(Sweep(clouds=(Cloud.AWS,)), as_json=False)
    assert refused.value.hint == "--region us-east-1, or set AWS_REGION"


@pytest.mark.parametrize("damage", [None, b"{"], ids=["gone", "damaged"])
def test_a_living_job_without_an_order_is_left_alone_and_said_with_what_ends_it(damage):
    store, told = MemoryStore(JumpingClock(NOW)), []
    store.url = "s3://jobs"
    JobStore(store, "digits").create(state(group="us-east-2/gpucloud-digits"))
    if damage is not None:
        store.put("jobs/digits/control/order.json", damage)
    census = SimpleNamespace(account="123456789012", regional=False, things=lambda: (thing(),))
    memory = SimpleNamespace(load=lambda _owner: {}, save=lambda _owner, _seen: None)
    sweeper = Sweeper(census=census, store=store, clock=JumpingClock(NOW), sightings=memory, story=told.append)
    assert sweeper.look().strays == ()
    [line] = told
    assert "order.json is" in line
    assert line.endswith("what is there of gpucloud-digits is left alone (gpucloud down digits)")


@dataclass
class Unwell:
    """A store that is away, or a cloud that does not answer."""

    error: GpucloudError
    url: str = "file:///disk"
    account: str = OWNER.account
    regional: bool = False
    regions: tuple[str, ...] = ()
    asked: int = 0

    def get(self, _key):
        self.asked += 1
        raise self.error

    def things(self):
        raise self.error


AWAY = StoreError("/disk, the store's folder, is not there", hint="mount it again", may_pass=True)
TAKEN = (thing("i-1", gpucloud_store="file:///disk"), thing("i-2", gpucloud_store="file:///disk"))


@pytest.mark.parametrize(
    "unwell",
    [
        {
            "store": Unwell(AWAY),
            "census": Account(
                (*TAKEN, thing("i-3", gpucloud_store="file:///disk", gpucloud_cluster="gpucloud-x", gpucloud_job="x"))
            ),
        },
        {"store": Unwell(CredentialsError("nobody may")), "census": Account(TAKEN)},
        {"store": MemoryStore(JumpingClock(NOW)), "census": Unwell(ProvisionError("no answer"))},
    ],
)
def test_what_cannot_be_asked_is_left_alone_with_one_line_and_keeps_no_stray_elsewhere_from_being_found(
    tmp_path, monkeypatch, capsys, unwell
):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    [healthy] = looks(FLEET)
    unwell["store"].url = "file:///disk"
    first = replace(healthy, **unwell)
    error = unwell["store"].error if isinstance(unwell["store"], Unwell) else unwell["census"].error
    for there, code in ((), error.exit_code), ((thing(account="embedded"),), 30):
        monkeypatch.setattr(
            "gpucloud.cli.commands.machines.sweepers",
            lambda *_, there=there: [first, replace(healthy, census=Account(there, *FLEET))],
        )
        assert gc(Sweep(), as_json=False) == code
        said = capsys.readouterr()
        assert ("i-1" in said.out, "i-2" in said.out) == (bool(there), False)
        line = f"NOT LOOKED AT: what jobs in file:///disk have, which is left alone: {error}"
        assert [one for one in said.err.splitlines() if "file:///disk" in one] == [line]
        assert gc(Sweep(), as_json=True) == code
        [unread] = json.loads(capsys.readouterr().out)["unread"]
        assert (unread["store"], unread["error"], unread["profile"]) == ("file:///disk", error.code, None)
    if isinstance(unwell["store"], Unwell):
        assert unwell["store"].asked == 4  # once a look


@pytest.mark.parametrize(
    ("known", "kept", "found"),
    [
        ("digits", None, 0),
        ("digits", "jobs/digits-2/state.json", 0),
        ("digits", "jobs/digits/checkpoints/gen/000001", 1),
        ("other", None, 1),
    ],
)
def test_what_is_of_a_known_job_is_no_stray_where_its_store_has_nothing_of_it(known, kept, found):
    store, told = MemoryStore(JumpingClock(NOW)), []
    store.url = "s3://jobs"
    if kept is not None:
        store.put(kept, b"{}")
    census = SimpleNamespace(account="123456789012", regional=False, things=lambda: (thing(),))
    memory = SimpleNamespace(load=lambda _owner: {}, save=lambda _owner, _seen: None)
    clock, here = JumpingClock(NOW), frozenset({known})
    sweeper = Sweeper(census=census, store=store, clock=clock, sightings=memory, story=told.append, known=here)
    assert len(sweeper.look().strays) == found
    assert [line.partition(",")[0] for line in told] == ["nothing of digits is in s3://jobs"][: 1 - found]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_left_alone_of_a_job_that_cannot_be_read_gives_the_exit_code_where_there_are_no_strays(
    tmp_path, monkeypatch, capsys, damaged
):
    """A pipeline read "no strays" of machines that are paid."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    [healthy] = looks(FLEET)
    if damaged:
        healthy.store.put("jobs/digits/state.json", b"{")
    stray, told = thing("i-2", gpucloud_cluster="gpucloud-x", gpucloud_job="x"), []
    for others, code in ((), StoreError.exit_code), ((stray,), 30):
        census = Account((*others, thing()))
        one = replace(healthy, known=frozenset({"digits"}), census=census, story=told.append)
        monkeypatch.setattr("gpucloud.cli.commands.machines.sweepers", lambda *_, one=one: [one])
        assert gc(Sweep(), as_json=True) == code
        said = capsys.readouterr()
        found = json.loads(said.out)
        assert [one["id"] for one in found["strays"]] == [one.id for one in others]
        assert [(one["store"], one["error"]) for one in found["unread"]] == [("s3://jobs", "store")]
        assert "NOT LOOKED AT" not in said.err
    assert ["what is there of gpucloud-digits is left alone" in line for line in told] == [True, True]
