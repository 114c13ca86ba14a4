"""Whatever machines that drive a job write into its prefix, `down` ends them and shows that nothing is left."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters import home
from gpucloud.domain import codec, untrusted
from gpucloud.domain.errors import CredentialsError, HostUnreachable, ProvisionError, StoreError, ToolMissing
from gpucloud.domain.job.quantities import format_usd
from gpucloud.domain.job.spec import KnownJob
from gpucloud.domain.node.status import Stop, desired_from_json
from gpucloud.domain.state.state import NOT_THERE, ExitReason, JobState, MissingOutput, Owner, UsageInterval
from gpucloud.domain.supervision.self_driving import arming
from gpucloud.domain.untrusted import RECORD_BYTES
from gpucloud.ports import Brought
from gpucloud.usecases.job import passes
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.wiring import Gpucloud
from tests.fakes.agent import Training
from tests.faults.process import Ended, run
from tests.faults.rig import GROUP, JOB, NoOutputs, Outside, Rigged
from tests.faults.strikes import Blow, Strikes

OWNER = Owner(
    id="x", host="ip-10-0-0-7", pid=1, started="1", since=datetime.fromisoformat("2026-03-01T12:00Z"), node="i-1"
)


def left_to_its_machines(
    folder: Path, *, drive: bool = True, steps: int = 4000, outputs: tuple[str, ...] = ()
) -> Outside:
    """A job whose machines train, behind a shut-off of eight hours, and whose supervisor is gone."""
    outside = Outside(folder, training=Training(nodes=2, steps=steps, every=100, step_s=0.5))
    outside.job = replace(outside.job, outputs=outputs)
    key = folder / "home" / "keys" / "made" / JOB
    key.parent.mkdir(parents=True)
    key.write_text("k")
    for at in range(150, 550, 10):
        strikes = Strikes(blow=Blow.KILL, at=at)
        run(("train", str(outside.file)), outside.over(strikes), strikes)
        attempt = state(outside).attempt
        if attempt is not None and all(outside.fleet.machine(m.node_id).part for m in attempt.members):
            break
    now = outside.clock.now()
    if drive:
        jobs(outside).arm(arming(state(outside), at=now, machines=2, until=now + timedelta(hours=8)))
    outside.pass_by(20)  # the supervisor's lease is over
    return outside


def jobs(outside: Outside) -> JobStore:
    return JobStore(outside.store, JOB)


def state(outside: Outside) -> JobState:
    loaded = jobs(outside).load()
    assert loaded is not None
    return loaded[0]


def down(outside: Outside, *options: str) -> Ended:
    strikes = Strikes()
    return run(("down", JOB, *options), outside.over(strikes), strikes)


def interval(own: JobState, **changes: object) -> JobState:
    plain = UsageInterval(node_id="i-9", pool=own.pool, launched_at=datetime.fromisoformat("2026-03-01T12:00Z"))
    return replace(own, nodes=(*own.nodes, replace(plain, **changes)))  # type: ignore[arg-type]


def written(change: Callable[[JobState], JobState]) -> Callable[[Outside], bytes]:
    return lambda outside: codec.to_json(change(state(outside))).encode()


LIES: dict[str, Callable[[Outside], bytes]] = {
    "nothing readable": lambda _: b"{",
    "nothing": lambda _: b"",
    "more than is read": lambda _: b"[" * (RECORD_BYTES + 1),
    "depths without an end": lambda _: b"[" * 1000000,
    "another version": lambda _: b'{"version":99}',
    "a lease for ever": written(lambda own: replace(own, lease_s=1e9, owner=OWNER)),
    "a lease beyond all numbers": written(lambda own: replace(own, lease_s=1e300, owner=OWNER)),
    "a machine from the end of time": lambda outside: written(
        lambda own: interval(own, launched_at=datetime.fromisoformat("2100-01-01T00:00:00Z"))
    )(outside).replace(b"2100-01-01T00:00:00", b"9999-12-31T23:59:59"),
    "a machine of a type that nobody has": written(
        lambda own: interval(own, pool=replace(own.pool, instance_type="nope.1"))
    ),
    "a machine that ends at the end of time": written(
        lambda own: replace(
            own, nodes=tuple(replace(one, ended_at=datetime.fromisoformat("2500-12-31T00:00Z")) for one in own.nodes)
        )
    ),
    "members that no group has": written(
        lambda own: replace(
            own,
            attempts=tuple(
                replace(one, members=tuple(replace(m, rank=10**9) for m in one.members)) for one in own.attempts
            ),
        )
    ),
    "an attempt of nobody": written(
        lambda own: replace(own, attempts=tuple(replace(one, members=()) for one in own.attempts))
    ),
    "a job that has ended and left nothing": written(
        lambda own: replace(own, group=None, torn_down=True, drives_itself=False)
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_state_that_its_machines_wrote_keeps_nobody_from_ending_them(tmp_path: Path, lie: str) -> None:
    outside = left_to_its_machines(tmp_path)
    assert len(outside.cloud.describe(GROUP).alive) == 2
    outside.store.put(f"jobs/{JOB}/state.json", LIES[lie](outside))
    ended = down(outside)
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 0), ended.stderr
    assert (state(outside).exit_reason, state(outside).torn_down) == (ExitReason.STOPPED, True)
    closed = jobs(outside).armings()[-1]
    assert (closed.machines, len(closed.listed or ())) == (0, 2)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def full(key: str, *_: object, **__: object) -> str:
    raise StoreError(f"cannot write {key}: No space left on device", hint="free some space there") from OSError(
        errno.ENOSPC, "No space left on device"
    )


class Denied(Exception):
    """As botocore tells it."""

    def __init__(self) -> None:
        super().__init__("AccessDenied")
        self.response = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}


def denied(key: str, *_: object, **__: object) -> str:
    raise StoreError(f"cannot write {key}: AccessDenied", hint="let this identity put objects there") from Denied()


@pytest.mark.parametrize("drive", [False, True])
@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_store_that_takes_no_write_keeps_nobody_from_ending_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, drive: bool, is_supervised: bool
) -> None:
    outside = left_to_its_machines(tmp_path, drive=drive)
    if is_supervised:
        outside.store.put(f"jobs/{JOB}/state.json", codec.to_json(replace(state(outside), owner=OWNER)).encode())
    purge, ran = outside.cloud.purge, list[object]()

    def purged(group: str, **named: Any) -> None:
        ran.extend(outside.fleet.machine(node.id).part for node in outside.cloud.describe(group).alive)
        purge(group, **named)

    with monkeypatch.context() as patched:
        patched.setattr(outside.store, "put", full)
        patched.setattr(outside.store, "write", full)
        patched.setattr(outside.cloud, "purge", purged)
        ended = down(outside)
    assert ran == [None, None], "the script is stopped before its machines end"
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 15), ended.stderr
    assert "nothing can be written there: ending the script and the machines of small all the same\n" in ended.stderr
    assert "error: the machines of small are ended, and that is not written down: cannot write jobs/" in ended.stderr
    assert (
        "hint: free some space there, then gpucloud down small notes what it has cost and removes what is left"
        in ended.stderr
    )
    again = down(outside)
    assert (again.code, state(outside).torn_down, outside.cloud.describe(GROUP).exists) == (0, True, False), again
    assert all(one.ended_at is not None for one in state(outside).nodes)


@pytest.mark.parametrize("drive", [False, True])
def test_a_home_that_takes_no_write_keeps_nobody_from_ending_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, drive: bool
) -> None:
    monkeypatch.setattr(Rigged, "signer", Gpucloud.signer)
    monkeypatch.setattr(Rigged, "reader", Gpucloud.reader)
    outside = left_to_its_machines(tmp_path, drive=drive)
    assert outside.home.order_marks.seen(outside.store.url, JOB) is not None

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("gpucloud.adapters.home.write_whole", full)
    ended = down(outside)
    assert (ended.code, outside.cloud.describe(GROUP).alive, state(outside).torn_down) == (0, (), True), ended.stderr


@pytest.mark.parametrize("drive", [False, True])
@pytest.mark.parametrize("is_supervised", [False, True])
@pytest.mark.parametrize("key", ["", f"jobs/{JOB}/control/order.json"])
def test_who_may_not_write_to_a_jobs_store_ends_nothing_that_others_can_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, *, drive: bool, is_supervised: bool
) -> None:
    outside = left_to_its_machines(tmp_path, drive=drive)
    if is_supervised:
        outside.store.put(f"jobs/{JOB}/state.json", codec.to_json(replace(state(outside), owner=OWNER)).encode())
    put, alive = outside.store.put, outside.cloud.describe(GROUP).alive

    def refused(name: str, *given: Any, **named: Any) -> str:
        return denied(name) if name.startswith(key) else put(name, *given, **named)

    with monkeypatch.context() as reader:
        reader.setattr(outside.store, "put", refused)
        ended = down(outside)
    assert (outside.cloud.describe(GROUP).alive, ended.code) == (alive, 15), ended.stderr
    assert all(outside.fleet.machine(node.id).part for node in alive), "the script goes on"
    assert "error: small is not ended: you may not write to its store, and who may can save it: cannot write jobs/" in (
        ended.stderr
    )
    until = outside.cloud.describe(GROUP).armed_until
    assert f"AccessDenied; 2 machines of it go on, paid until {until:%H:%M:%S} UTC" in ended.stderr
    who = "its own node i-1" if is_supervised else "whoever started it"
    assert f"hint: let this identity put objects there, then gpucloud down small; or that by {who}; " in ended.stderr
    assert down(outside).code == 0
    assert state(outside).checkpoint is not None


def test_a_script_that_does_not_leave_is_killed_before_its_machines_end_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    monkeypatch.setattr(outside.store, "put", full)
    monkeypatch.setattr(outside.fleet, "_step", lambda *_: None)
    wanted = [Stop.NO]
    for node in outside.cloud.describe(GROUP).alive:
        machine = outside.fleet.machine(node.id)
        monkeypatch.setattr(machine, "take", lambda data, take=machine.take: (take(data), heard(data)))
    heard = lambda data: wanted.append(desired_from_json(data).stop)  # noqa: E731
    ended = down(outside)
    assert wanted == [Stop.NO, Stop.SAVE, Stop.SAVE, Stop.KILL, Stop.KILL]
    assert "attempt 1 has not left within 1 min: killing it\n" in ended.stderr
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 15), ended.stderr


NO_ROOM = StoreError("out has 3 MiB free, and 4 GiB are to come", hint="free some space there")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (NO_ROOM, "free some space there"),
        (CredentialsError("the key is not here"), "see to that"),
        (HostUnreachable("i-1: no answer", hint="wait"), "wait"),
    ],
)
def test_no_machine_is_ended_whose_results_cannot_come_home_unless_one_gives_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False, outputs=("out/",))
    alive = outside.cloud.describe(GROUP).alive

    def refused(*_: object) -> Brought:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(outside.store, "put", full)
        patched.setattr(NoOutputs, "bring_home", refused)
        ended = down(outside)
        assert (outside.cloud.describe(GROUP).alive, ended.code) == (alive, 15), ended.stderr
        assert not any(outside.fleet.machine(node.id).part for node in alive)
        until, usd = outside.cloud.describe(GROUP).armed_until, format_usd(2 * state(outside).dearest_usd_per_hour)
        assert (
            "error: small is stopped, and its machines are not ended: results of attempt 1 could not come home:"
            f" {error}; 2 machines of it go on, paid until {until:%H:%M:%S} UTC, for at most {usd} an hour\n"
            f"hint: {hint}, then gpucloud down small; gpucloud down small --abandon ends them without\n"
        ) in ended.stderr
        purge, kept = outside.cloud.purge, list[object]()
        patched.setattr(outside.cloud, "purge", lambda group, *, keep: (purge(group), kept.extend(keep)))
        given_up = down(outside, "--abandon")
    assert (outside.cloud.describe(GROUP).alive, given_up.code) == ((), 15), given_up.stderr
    first = alive[0].id
    assert kept == [(first, f"code/{state(outside).attempts[0].tree}")], "a host of one's own keeps them"
    assert f"out/ of attempt 1 did not come home: whatever was written there goes with {first}" in given_up.stderr


def test_machines_are_ended_where_results_come_at_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = left_to_its_machines(tmp_path, drive=False, outputs=("out/",))
    monkeypatch.setattr(outside.store, "put", full)
    monkeypatch.setattr(NoOutputs, "bring_home", Failing(NO_ROOM, NoOutputs().bring_home, 1))
    assert down(outside).code == 15
    ended = down(outside)
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 15), ended.stderr
    assert "error: the machines of small are ended, and that is not written down" in ended.stderr


@pytest.mark.parametrize("missing", [None, (), (MissingOutput(path="out/b", why="was left out"),)])
def test_results_that_came_home_are_not_told_as_lost_once_the_store_takes_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[MissingOutput, ...] | None
) -> None:
    outside, came = left_to_its_machines(tmp_path, drive=False, outputs=("out/",)), dict[datetime, Any]()
    unasked = MissingOutput(path="out/of/another", why=NOT_THERE)
    brought = Brought(missing=(*(missing or ()), unasked))
    monkeypatch.setattr(NoOutputs, "bring_home", lambda *_: brought)
    if missing is not None:
        monkeypatch.setattr(
            NoOutputs, "note", lambda _, attempt, lacks, began: came.update({attempt.started_at: lacks})
        )
    monkeypatch.setattr(NoOutputs, "came", lambda _, attempt: came.get(attempt.started_at))
    with monkeypatch.context() as patched:
        patched.setattr(outside.store, "put", full)
        assert down(outside).code == 15
    (attempt,) = state(outside).attempts
    assert (attempt.reason, outside.cloud.describe(GROUP).alive) == (None, ())
    ended, first = down(outside), attempt.members[0].node_id
    (attempt,) = state(outside).attempts
    assert (ended.code, state(outside).torn_down) == (0, True), ended.stderr
    lost = f"out/ of attempt 1 did not come home: whatever was written there goes with {first}"
    assert (lost in ended.stderr) is (missing is None)
    if missing is not None:
        assert attempt.missing_outputs == missing


def test_results_of_an_attempt_before_come_too_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False, outputs=("out/",))
    own, asked = state(outside), list[tuple[int, str]]()
    (last,) = own.attempts
    other = replace(last.members[0], node_id=last.members[1].node_id)
    lost = MissingOutput(path="out/", why="did not come home", attempt=1)
    before = replace(last, members=(other,), reason=ExitReason.RESCHEDULED, missing_outputs=(lost,))
    moved = replace(own, attempts=(before, replace(last, number=2)))
    outside.store.put(f"jobs/{JOB}/state.json", codec.to_json(moved).encode())

    def bring_home(_: object, host: Any, code: str, number: int, *more: object) -> Brought:
        asked.append((number, host.node.id))
        if number == 1:
            raise NO_ROOM
        return Brought()

    monkeypatch.setattr(outside.store, "put", full)
    monkeypatch.setattr(NoOutputs, "bring_home", bring_home)
    ended = down(outside)
    assert asked == [(1, other.node_id), (2, last.members[0].node_id)]
    assert len(outside.cloud.describe(GROUP).alive) == 2, ended.stderr
    assert (
        "results of attempt 1 could not come home: out has 3 MiB free, and 4 GiB are to come; 2 machines"
        in ended.stderr
    )


def test_that_machines_go_on_is_said_where_the_cloud_refuses_to_end_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    monkeypatch.setattr(outside.store, "put", full)
    monkeypatch.setattr(outside.cloud, "purge", Failing(CredentialsError("log in"), outside.cloud.purge, 1))
    ended = down(outside)
    assert (len(outside.cloud.describe(GROUP).alive), ended.code) == (2, 3)
    assert "2 machines of it go on, paid until" in ended.stderr


def test_who_may_not_write_can_have_the_machines_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    monkeypatch.setattr(outside.store, "put", denied)
    ended = down(outside, "--abandon")
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 15), ended.stderr


def test_an_order_that_is_given_on_a_full_disk_is_noted_in_the_room_that_was_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever supervises the job from that home ended with the order, which it may not act on unnoted."""
    monkeypatch.setattr(Rigged, "signer", Gpucloud.signer)
    monkeypatch.setattr(Rigged, "reader", Gpucloud.reader)
    outside = left_to_its_machines(tmp_path, drive=False)
    outside.home.require_room(0)
    reserve, real, put = outside.home.root / "reserve", home.write_whole, outside.store.put
    whole = reserve.stat().st_size

    def full(what: object) -> None:
        if reserve.stat().st_size == whole:
            raise StoreError(f"cannot write {what}") from OSError(errno.ENOSPC, "No space left on device")

    def written(path: Path, *more: Any, **options: Any) -> None:
        full(path)
        real(path, *more, **options)

    def stored(key: str, *more: Any, **options: Any) -> Any:
        full(key)
        return put(key, *more, **options)

    monkeypatch.setattr(home, "write_whole", written)
    monkeypatch.setattr(outside.store, "put", stored)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=whole - reserve.stat().st_size))
    strikes = Strikes()
    changed = run(("budget", JOB, "2 USD"), outside.over(strikes), strikes)
    assert (changed.code, state(outside).order_number) == (0, 2), changed.stderr
    assert outside.home.order_marks.seen(outside.store.url, JOB).number == 2
    assert len(outside.cloud.describe(GROUP).alive) == 2
    assert reserve.stat().st_size >= whole / 2  # a later `down` has room, too


def test_machines_that_another_supervisor_goes_on_with_are_left_to_it_where_the_store_takes_no_write_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    put, sleep = outside.store.put, outside.clock.sleep

    def refused(key: str, *_: object, **__: object) -> str:
        cause = OSError(errno.EROFS, "Read-only file system")
        raise StoreError(f"cannot write {key}: Read-only file system", hint="name another store") from cause

    def goes_on(seconds: float) -> None:
        sleep(seconds)
        put(f"jobs/{JOB}/state.json", codec.to_json(replace(state(outside), owner=OWNER)).encode())

    monkeypatch.setattr(outside.store, "put", refused)
    monkeypatch.setattr(outside.clock, "sleep", goes_on)
    goes_on(0)
    ended = down(outside)
    assert (len(outside.cloud.describe(GROUP).alive), ended.code) == (2, 15), ended.stderr
    assert "Read-only file system; its own node i-1 can, and goes on with small" in ended.stderr
    assert "hint: gpucloud down small there" in ended.stderr


@pytest.mark.parametrize(
    ("folder", "drive"),
    [("checkpoints/gen", False), ("checkpoints/commit", False), ("ledger", True), ("checkpoints/gen", True)],
)
def test_more_objects_than_any_job_has_keep_nobody_from_ending_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, drive: bool
) -> None:
    outside = left_to_its_machines(tmp_path, drive=drive)
    for number in range(80):
        outside.store.put(f"jobs/{JOB}/{folder}/{number:012d}", b"x")
    monkeypatch.setattr(untrusted, "LISTED_KEYS", 70)
    ended = down(outside)
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 0), ended.stderr
    assert state(outside).torn_down


@pytest.mark.parametrize("lie", ["members that no group has", "an attempt of nobody"])
def test_a_state_that_no_supervisor_writes_is_damaged_and_the_command_that_helps_is_named(
    tmp_path: Path, lie: str
) -> None:
    outside = left_to_its_machines(tmp_path)
    outside.store.put(f"jobs/{JOB}/state.json", LIES[lie](outside))
    strikes = Strikes()
    ended = run(("reconcile", JOB), outside.over(strikes), strikes)
    where = f"memory:///store/jobs/{JOB}/state.json"
    said = [f"error: {where} has an attempt whose machines are not ranked from 0 on"]
    assert (ended.code, ended.stderr.splitlines()[-2:]) == (
        15,
        [*said, f"hint: gpucloud down {JOB} ends the job all the same"],
    )


def test_what_was_unreadable_is_put_aside_and_not_lost(tmp_path: Path) -> None:
    outside = left_to_its_machines(tmp_path)
    outside.store.put(f"jobs/{JOB}/state.json", b"{?")
    down(outside)
    [kept] = outside.store.list(f"jobs/{JOB}/control/put-aside/")
    found = outside.store.get(kept)
    assert found is not None
    assert found.data == b"{?"


class Stuck(BaseException):
    """The command asks and asks."""


@pytest.mark.parametrize("names", [("i-1",), ("i-1", "i-2")], ids=["one name", "a new name each time"])
def test_a_machine_that_keeps_the_job_and_does_not_end_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """It renews its lease for as long as it lives, whatever the order says."""
    monkeypatch.setattr(passes, "_MACHINE_ENDS_WITHIN", timedelta(minutes=1))
    outside = left_to_its_machines(tmp_path)
    holds, look, turns = state(outside), outside.look, count()
    looks = count()

    def renews(call: str) -> None:
        look(call)
        if outside.cloud.describe(GROUP).alive:
            owner = replace(OWNER, node=names[next(turns) // 7 % len(names)])
            outside.store.put(f"jobs/{JOB}/state.json", codec.to_json(replace(holds, owner=owner)).encode())
            if next(looks) > 20000:
                raise Stuck

    began = outside.clock.now()
    outside.look = renews  # type: ignore[method-assign]
    renews("")
    ended = down(outside)
    assert ended.code == 0, ended.stderr
    assert outside.cloud.describe(GROUP).alive == ()
    assert outside.clock.now() - began < timedelta(minutes=3)


def test_a_damaged_state_that_no_machine_could_write_is_said_and_nothing_is_ended(tmp_path: Path) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    outside.store.put(f"jobs/{JOB}/state.json", b"{")
    ended = down(outside)
    assert ended.code == 15
    assert len(outside.cloud.describe(GROUP).alive) == 2


def test_one_jobs_lie_keeps_nobody_from_the_next_job(tmp_path: Path) -> None:
    outside = left_to_its_machines(tmp_path)
    outside.store.put(f"jobs/{JOB}/state.json", LIES["a lease beyond all numbers"](outside))
    outside.home.remember(KnownJob(name="zebra", store=outside.store.url, file=outside.file))
    strikes = Strikes()
    ended = run(("reconcile", "--all", "--json"), outside.over(strikes), strikes)
    assert {one["job"] for one in json.loads(ended.stdout)["jobs"]} >= {"zebra"}


@pytest.mark.parametrize(
    "order", [b"garbage", b'{"order":"{\\"version\\":1}"}', None], ids=["damaged", "no order", "gone"]
)
@pytest.mark.parametrize("file", [True, False], ids=["with its file", "without"])
def test_a_job_whose_order_nobody_can_read_is_ended_all_the_same(
    tmp_path: Path, order: bytes | None, *, file: bool
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    key = f"jobs/{JOB}/control/order.json"
    outside.store.delete(key)
    if order is not None:
        outside.store.put(key, order)
    if not file:
        outside.file.unlink()
    ended = down(outside)
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 0), ended.stderr
    assert "ending the job by an order of your own in its place" in ended.stderr
    assert state(outside).torn_down


@pytest.mark.parametrize(
    "words", [("train", "FILE"), ("train", JOB), ("budget", JOB), ("reconcile", JOB)], ids=" ".join
)
@pytest.mark.parametrize("order", [b"{", None], ids=["damaged", "gone"])
def test_no_second_run_begins_beside_machines_whose_order_nobody_can_read(
    tmp_path: Path, order: bytes | None, words: tuple[str, str]
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    key, strikes = f"jobs/{JOB}/control/order.json", Strikes()
    outside.store.delete(key)
    if order is not None:
        outside.store.put(key, order)
    ended = run(tuple(str(outside.file) if word == "FILE" else word for word in words), outside.over(strikes), strikes)
    assert (ended.code, ended.stderr.splitlines()[-1]) == (15, f"hint: gpucloud down {JOB}")
    assert [name for name in outside.store.list("jobs/") if not name.startswith(f"jobs/{JOB}/")] == []
    assert len(outside.cloud.describe(GROUP).alive) == 2


def test_an_order_of_a_newer_gpucloud_is_not_written_over(tmp_path: Path) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    stored = outside.store.get(f"jobs/{JOB}/control/order.json")
    assert stored is not None
    newer = json.loads(stored.data)
    newer["order"] = json.dumps({**json.loads(newer["order"]), "version": 99})
    outside.store.put(f"jobs/{JOB}/control/order.json", json.dumps(newer).encode())
    assert down(outside).code == 15
    assert len(outside.cloud.describe(GROUP).alive) == 2


def attended_again(outside: Outside) -> None:
    """The machines drove the job for a while; it was taken back since."""
    at, until = outside.clock.now() - timedelta(hours=2), outside.clock.now() - timedelta(hours=1)
    jobs(outside).arm(arming(state(outside), at=at, machines=2, until=until))
    jobs(outside).arm(arming(state(outside), at=at + timedelta(minutes=1), machines=0, until=at))


class Failing:
    """A call of the cloud that fails so many times."""

    def __init__(self, error: Exception, call: Callable[..., object], times: int) -> None:
        self._error, self._call, self._left = error, call, times

    def __call__(self, *given: object, **named: object) -> object:
        self._left -= 1
        if self._left >= 0:
            raise self._error
        return self._call(*given, **named)


@pytest.mark.parametrize("driven", ["never", "before", "now"])
@pytest.mark.parametrize(
    "error",
    [
        ProvisionError("terraform: DependencyViolation"),
        ToolMissing("terraform is not on PATH"),
        CredentialsError("no"),
        caused(StoreError("cannot write ~/.gpucloud/keys: No space left on device"), OSError(errno.ENOSPC, "full")),
    ],
)
def test_what_fails_on_the_users_side_puts_no_good_state_aside(tmp_path: Path, driven: str, error: Exception) -> None:
    outside = left_to_its_machines(tmp_path, drive=driven == "now")
    if driven == "before":
        attended_again(outside)
    destroy = outside.provisioner.destroy
    outside.provisioner.destroy = Failing(error, destroy, 1000)  # type: ignore[method-assign]
    first = down(outside)
    assert first.code != 0, first.stderr
    outside.provisioner.destroy = destroy  # type: ignore[method-assign]
    again = down(outside)
    assert (outside.cloud.describe(GROUP).alive, again.code) == ((), 0), again.stderr
    assert len(state(outside).attempts) == 1
    assert outside.store.list(f"jobs/{JOB}/control/put-aside/") == ()


def test_no_machine_is_forgotten_that_lives_in_another_region_than_the_last_arming(tmp_path: Path) -> None:
    """The job moved since its machines drove it, and its cloud refuses there."""
    outside = left_to_its_machines(tmp_path, drive=False)
    attended_again(outside)
    elsewhere = f"r2/{GROUP}"
    outside.cloud.create(elsewhere)
    outside.cloud.arm(elsewhere, outside.clock.now() + timedelta(minutes=29))
    outside.cloud.resize(elsewhere, 2, state(outside).pool)
    current, stored = jobs(outside).load() or (None, None)
    assert current is not None
    assert stored is not None
    closed = replace(current.attempts[0], reason=ExitReason.INTERRUPTED, ended_at=outside.clock.now())
    jobs(outside).replace(replace(current, group=elsewhere, attempts=(closed,)), stored.version)
    outside.cloud.purge(GROUP)
    purge = outside.cloud.purge

    def refusing(group: str) -> None:
        if group == elsewhere:
            raise ProvisionError("autoscaling: AccessDenied in r2")
        purge(group)

    outside.cloud.purge = refusing  # type: ignore[method-assign]
    ended = down(outside)
    assert ended.code != 0
    assert (state(outside).group, state(outside).torn_down) == (elsewhere, False)


def test_what_machines_write_while_they_lose_the_right_to_is_believed_no_longer(tmp_path: Path) -> None:
    """Terraform takes a minute to take it away: until then they may write whatever they like."""
    outside = left_to_its_machines(tmp_path)
    current, stored = jobs(outside).load() or (None, None)
    assert current is not None
    assert stored is not None
    jobs(outside).replace(replace(current, drives_itself=True), stored.version)
    lie = codec.to_json(replace(state(outside), lease_s=1e9, owner=OWNER, drives_itself=False)).encode()
    ensure, lies = outside.provisioner.ensure, iter([lie])

    def ensuring(*given: object, **named: object) -> object:
        for one in lies:
            outside.store.put(f"jobs/{JOB}/state.json", one)
        return ensure(*given, **named)  # type: ignore[arg-type]

    outside.provisioner.ensure = ensuring  # type: ignore[assignment,method-assign]
    strikes = Strikes()
    held = run(("train", str(outside.file)), outside.over(strikes), strikes)
    assert (held.code, "1000000000 s" in held.stderr) == (4, False), held.stderr
    outside.pass_by(60)
    ended = down(outside)
    assert (outside.cloud.describe(GROUP).alive, ended.code) == ((), 0), ended.stderr
    assert jobs(outside).armings()[-1].machines == 0


@pytest.mark.parametrize("at", range(11, 16))
def test_a_budget_that_was_ordered_and_not_yet_armed_is_armed_by_the_same_command_again(
    tmp_path: Path, at: int
) -> None:
    outside = left_to_its_machines(tmp_path, drive=False)
    strikes = Strikes(blow=Blow.KILL, at=at)
    run(("budget", JOB, "0.20 USD"), outside.over(strikes), strikes)
    strikes = Strikes()
    again = run(("budget", JOB, "0.20 USD"), outside.over(strikes), strikes)
    armed = outside.cloud.describe(GROUP).armed_until
    assert again.code == 0, again.stderr
    assert armed is not None
    assert armed - outside.clock.now() < timedelta(minutes=3)
    assert state(outside).order_number == 2
