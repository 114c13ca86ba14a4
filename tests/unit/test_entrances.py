"""What stands before a job is supervised: name, secrets, key and code, the same for every command that comes to it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from botocore.exceptions import ClientError

from gpucloud.adapters.home import Home
from gpucloud.adapters.jobfile import read_job
from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.transfer.localfiles import CameNotes
from gpucloud.cli.commands import training as commands
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.checkpoint.protection import Saving
from gpucloud.domain.errors import (
    CredentialsError,
    DataStoreError,
    GpucloudError,
    ProvisionError,
    StoreError,
    UsageError,
)
from gpucloud.domain.job.code import RESULTS_MARK
from gpucloud.domain.job.spec import Cloud, Job, KnownJob
from gpucloud.domain.state.order import repeats_at_a_cost, run_of, undrillable
from gpucloud.domain.state.state import CheckpointRef, ExitReason, JobState, JobStatus
from gpucloud.store import newest_commit
from gpucloud.store.contract import NoBucket
from gpucloud.usecases.job.start import Prospect
from gpucloud.usecases.jobstore.condition import NodeStanding
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.jobstore.runs import current_run
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise.session import Supervisor
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.jobs import starter
from tests.fakes.agent import Training
from tests.faults.process import Ended, run
from tests.faults.rig import GROUP, JOB, Outside, Rigged
from tests.faults.strikes import Strikes
from tests.unit import worlds
from tests.unit.worlds import put_job

SECRET = "SECRET_OF_THE_TEST"


class Terminal(io.StringIO):
    """Where somebody sits."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


def give(outside: Outside, *words: str, at: int | None = None) -> Ended:
    """Give a command as a process of its own; with `at`, killed at that call."""
    strikes = Strikes(at=at)
    named = tuple(str(outside.file) if word == outside.file.name else word for word in words)
    return run(named, outside.over(strikes), strikes)


def state(outside: Outside) -> JobState:
    loaded = JobStore(outside.store, JOB).load()
    assert loaded is not None
    return loaded[0]


def alive(outside: Outside) -> int:
    return len(outside.cloud.describe(GROUP).alive)


def write(outside: Outside, more: str) -> None:
    outside.file.write_text(outside.file.read_text() + more)
    outside.job = read_job(outside.file)


def test_whoever_comes_to_a_job_goes_by_its_order_and_its_store_whatever_the_file_says_by_now(tmp_path: Path) -> None:
    cloud, file = Gpucloud(Home(tmp_path / "home")), tmp_path / "small.yaml"
    said = f"name: small\nrun: train.py\nresources: {{nodes: 2}}\nbudget: 1 USD\nstore: {tmp_path / 'one'}\n"
    file.write_text(said)
    (tmp_path / "train.py").touch()
    job = cloud.read_job(file)
    known = cloud.known(job, starter(cloud, job).start(job, file.read_bytes()).name, file)
    file.write_text(said.replace("nodes: 2", "nodes: 1").replace("train.py", "other.py").replace("/one", "/two"))

    given = cloud.orders(known).newest()
    ordered, edited = cloud.ordered(known).to_end(given)
    assert (ordered.resources.nodes, ordered.run, cloud.store(ordered).url) == (2, "train.py", known.store)
    assert edited is not None
    moved = replace(known, store=(tmp_path / "moved").as_uri())
    assert cloud.store(cloud.ordered(moved).to_end(given)[0]).url == moved.store


@pytest.mark.parametrize("command", [("train",), ("train", "--detach"), ("up",)])
def test_a_job_that_is_refused_for_want_of_a_secret_has_ordered_nothing(outside: Outside, command) -> None:
    write(outside, f"secrets: [{SECRET}]\n")
    refused = give(outside, command[0], "small.yaml", *command[1:])

    assert (refused.code, SECRET in refused.stderr) == (UsageError.exit_code, True)
    assert (outside.store.list(""), outside.home.known()) == ((), ())
    assert give(outside, "reconcile", "--all").code == 0
    assert alive(outside) == 0


def test_a_script_that_saves_nothing_is_refused_in_ci_and_has_ordered_nothing(outside: Outside, monkeypatch) -> None:
    """As on AWS, whose machines cost money; on the embedded fleet it is a warning."""
    (outside.file.parent / "train.py").write_text("print('no import of the library')\n")
    monkeypatch.setattr("gpucloud.cli.commands.training.must_be_meant", lambda *_: True)
    refused = give(outside, "train", "small.yaml")

    assert refused.code == UsageError.exit_code, refused.stderr
    assert "error: train.py does not save: an interruption starts it at the beginning" in refused.stderr
    assert "`checkpoint: none` where it is meant so" in refused.stderr
    assert (outside.store.list(""), outside.home.known()) == ((), ())

    write(outside, "checkpoint: none\n")
    assert give(outside, "train", "small.yaml").code == 0


@pytest.mark.parametrize("command", ["train", "up"])
def test_what_has_succeeded_is_paid_for_once_more_only_where_somebody_says_so(outside: Outside, monkeypatch, command):
    """As on AWS, whose machines cost money; on the embedded fleet it is said, and done."""
    monkeypatch.setattr(
        "gpucloud.cli.commands.training.repeats_at_a_cost",
        lambda job, before: repeats_at_a_cost(replace(job, cloud=Cloud.AWS), before),
    )
    assert give(outside, "train", "small.yaml").code == 0
    known, stored = outside.home.known(), outside.store.list("")
    refused = give(outside, command, "small.yaml")

    assert refused.code == UsageError.exit_code, refused.stderr
    assert re.search(r"^small succeeded at \d\d:\d\d:\d\d UTC: this starts small-2, a new run", refused.stderr, re.M)
    assert "small-2 would be a new run with a budget of 1.00 USD: nothing was started" in refused.stderr
    assert "hint: the same command with --again trains it once more" in refused.stderr
    assert (outside.home.known(), outside.store.list("")) == (known, stored)

    give(outside, command, "small.yaml", "--again")
    assert JobStore(outside.store, "small-2").load() is not None


def test_a_repeated_train_that_costs_nothing_says_that_it_is_a_new_run_and_starts_it(outside: Outside) -> None:
    assert give(outside, "train", "small.yaml").code == 0
    again = give(outside, "train", "small.yaml")
    assert "UTC: this starts small-2, a new run from step 0\n" in again.stderr
    assert JobStore(outside.store, "small-2").load() is not None


def test_the_lists_call_a_run_by_what_means_it_on_a_command_line(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    give(outside, "train", "small.yaml")
    first = ["small@1", "small-2"]
    listed = [line.split()[0] for line in give(outside, "status").stdout.splitlines()[1:]]
    costs = [line.split()[0] for line in give(outside, "cost", "--all").stdout.splitlines()[1:-1]]
    assert (sorted(listed), sorted(costs)) == (sorted(first), sorted(first))
    rows = json.loads(give(outside, "cost", "--all", "--json").stdout)["rows"]
    assert sorted(row["group"]["job"] for row in rows) == ["small-2", "small@1"]


@pytest.mark.parametrize(("answer", "started"), [("y\n", True), ("\n", False), ("n\n", False)])
def test_at_a_terminal_a_new_run_of_what_has_succeeded_is_asked_about(answer, started, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    ended = replace(worlds.state(), status=JobStatus.SUCCEEDED, ended_at=worlds.NOW)
    on_aws = replace(worlds.job(), cloud=Cloud.AWS)
    prospect = Prospect(name="digits-2", plan=SimpleNamespace(budget_usd=Decimal(20)), state=None, after=ended)
    with contextlib.nullcontext() if started else pytest.raises(UsageError, match="nothing was started"):
        commands._require_meant_again(SimpleNamespace(job=on_aws), prospect, worlds.NOW)
    assert sys.stderr.getvalue() == "start digits-2, a new run with a budget of 20.00 USD? [y/N] "


@pytest.mark.parametrize(
    ("script", "outputs", "said"),
    [
        ("print(1)\n", "", "NOTHING comes home: "),
        ("print(1)\n", "outputs: [results/]\n", None),
        ("from gpucloud import resume\n", "", "no file comes home: "),
    ],
)
def test_of_a_script_whose_files_do_not_stay_the_plan_says_so(outside, script, outputs, said):
    (outside.file.parent / "train.py").write_text(script)
    write(outside, outputs)
    done = give(outside, "train", "small.yaml")

    assert done.code == 0, done.stderr
    assert done.stderr.count("comes home: what the script writes goes with its machines") == (said is not None)
    assert said is None or f"  results    {said}what the script writes goes with its machines" in done.stderr


def test_who_copies_from_a_job_that_has_ended_is_told_where_its_outputs_and_weights_are(outside: Outside) -> None:
    assert give(outside, "train", "small.yaml").code == 0
    home = outside.file.parent / "outputs" / JOB
    home.mkdir(parents=True)
    refused = give(outside, "cp", f"{JOB}:out/done.txt", str(outside.file.parent))
    assert "its outputs are in" not in refused.stderr  # they may be another run's
    CameNotes(home).note((last := state(outside).attempts[-1]), (), last.started_at)
    refused = give(outside, "cp", f"{JOB}:out/done.txt", str(outside.file.parent))
    assert refused.code == UsageError.exit_code
    error, hint = refused.stderr.splitlines()
    assert error == f"error: {JOB} has ended, and has no machines any more: outputs and checkpoints alone are kept"
    weights = f"checkpoints stay in the job's store, `gpucloud checkpoints {JOB} --export FILE` gives the weights"
    assert hint == f"hint: its outputs are in {home}; {weights}"


def test_what_cp_brings_into_the_code_folder_is_told_to_be_code_and_is_named_by_the_next_start(
    outside: Outside,
) -> None:
    assert give(outside, "up", "small.yaml").code == 0
    code = outside.file.parent

    def brought(to: Path) -> str:
        done = give(outside, "cp", f"{JOB}:@store/state.json", str(to))
        assert done.code == 0, done.stderr
        return done.stderr

    said = "lies in the code folder: the next start sends it, and says that the code differs"
    assert f"{code}/state.json {said}; a line `/state.json` in .gpucloudignore leaves it out" in brought(code)
    (code / ".gpucloudignore").write_text("*.seen\nkept/\n")
    assert "code folder" not in brought(code / "state.seen")
    (code / "kept").mkdir()
    assert "code folder" not in brought(code / "kept")
    (code / "outputs").mkdir()
    (code / "outputs" / RESULTS_MARK).touch()
    assert "code folder" not in brought(code / "outputs")
    assert "code folder" not in brought(code.parent)
    told = give(outside, "up", "small.yaml").stderr
    assert "changed: the code differs from that of the last start in .gpucloudignore, state.json:" in told


def test_machines_that_are_up_train_no_script_in_ci_that_saves_nothing(outside: Outside, monkeypatch) -> None:
    (outside.file.parent / "train.py").write_text("print('no import of the library')\n")
    monkeypatch.setattr("gpucloud.cli.commands.training.must_be_meant", lambda *_: True)
    assert give(outside, "up", "small.yaml").code == 0
    before = outside.store.get(f"jobs/{JOB}/control/order.json")
    refused = give(outside, "train", "small.yaml")

    assert refused.code == UsageError.exit_code, refused.stderr
    assert "`checkpoint: none` where it is meant so" in refused.stderr
    assert outside.store.get(f"jobs/{JOB}/control/order.json") == before
    assert (alive(outside), state(outside).attempts) == (2, ())

    write(outside, "checkpoint: none\n")
    assert give(outside, "train", "small.yaml").code == 0


def on_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the embedded fleet's machines be taken for a drill as those of AWS are."""

    def judged(job: Job, **others: bool) -> str | None:
        return undrillable(replace(job, cloud=Cloud.AWS), **others)

    monkeypatch.setattr("gpucloud.cli.commands.training.undrillable", judged)


def test_a_drill_for_which_no_spot_machine_can_come_is_refused_before_any_money_is_spent(outside, monkeypatch):
    on_aws(monkeypatch)
    outside.file.write_text(outside.file.read_text().replace("nodes: 2", "nodes: 2, market: on_demand"))
    outside.job = read_job(outside.file)
    refused = give(outside, "train", "small.yaml", "--drill")

    assert refused.code == UsageError.exit_code
    assert "error: --drill: AWS takes spot machines alone, and `market: on_demand` has none\n" in refused.stderr
    assert f"hint: gpucloud train {outside.file} --cloud local --drill rehearses it here\n" in refused.stderr
    assert (outside.store.list(""), alive(outside)) == ((), 0)


@pytest.mark.parametrize("own", [{"subnets": ("subnet-0a1b2c3d",)}, {"instance_profile": "nodes"}])
def test_a_drill_for_which_no_role_is_made_is_refused(outside: Outside, own: dict[str, Any]) -> None:
    """No role for drills is made where network or roles are the user's own."""
    job = replace(outside.job, cloud=Cloud.AWS)
    assert undrillable(job, drives_itself=False) is None
    told = (
        f"AWS takes a machine by a role that gpucloud makes, and beside `aws: {{{next(iter(own))}: …}}` it makes none"
    )
    assert undrillable(replace(job, aws=replace(job.aws, **own)), drives_itself=False) == told
    assert undrillable(replace(job, cloud=Cloud.LOCAL, aws=replace(job.aws, **own)), drives_itself=False) is None


@pytest.mark.parametrize(
    ("roles", "regions", "has"),
    [
        ({"us-east-1"}, ("us-east-1",), True),
        ({"us-east-1"}, ("us-east-1", "us-west-2"), False),
        (set(), ("us-east-1",), False),
        (None, ("us-east-1",), False),  # who asks may not see it
    ],
)
def test_a_drill_beside_a_profile_goes_by_the_role_that_an_earlier_job_had_made(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, roles: set[str] | None, regions: tuple[str, ...], has: bool
) -> None:
    def get_role(RoleName: str) -> dict[str, Any]:  # noqa: N803  as botocore has it
        if roles is None:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetRole")
        if RoleName not in {f"gpucloud-base.drill-{region}" for region in roles}:
            raise ClientError({"Error": {"Code": "NoSuchEntity"}}, "GetRole")
        return {"Role": {}}

    aws = SimpleNamespace(client=lambda *_: SimpleNamespace(get_role=get_role))
    monkeypatch.setattr(Gpucloud, "aws", lambda *_: SimpleNamespace(aws=aws, regions=regions))
    cloud = Gpucloud(Home(outside.file.parent))
    job = replace(outside.job, cloud=Cloud.AWS, aws=replace(outside.job.aws, instance_profile="nodes"))
    assert cloud.has_drill_role(job) is has
    assert (undrillable(job, drives_itself=False, has_role=has) is None) is has
    assert not cloud.has_drill_role(replace(job, cloud=Cloud.LOCAL))


@pytest.mark.parametrize("leaves", [("--unattended", "8h"), ("--detach",)])
def test_a_drill_that_machines_on_aws_may_not_make_is_refused_before_any_money_is_spent(outside, leaves, monkeypatch):
    """As on AWS; machines of the embedded fleet may."""
    assert undrillable(outside.job, drives_itself=True) is None
    on_aws(monkeypatch)
    monkeypatch.setattr(Rigged, "unable", lambda *_: None)
    refused = give(outside, "train", "small.yaml", "--drill", *leaves)

    assert refused.code == UsageError.exit_code
    assert "error: --drill: on AWS, machines that drive their job have no right to take one\n" in refused.stderr
    assert f"hint: gpucloud train {outside.file} --drill; Ctrl-C leaves the job to its machines after" in refused.stderr
    assert (outside.store.list(""), alive(outside)) == ((), 0)


def test_a_start_that_is_refused_for_want_of_a_secret_leaves_the_order_as_it_was(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    before = outside.store.get(f"jobs/{JOB}/control/order.json")
    write(outside, f"secrets: [{SECRET}]\n")

    assert give(outside, "train", "small.yaml").code == UsageError.exit_code
    after = outside.store.get(f"jobs/{JOB}/control/order.json")
    assert before is not None
    assert after is not None
    assert after.version == before.version


def test_a_name_that_another_store_has_is_refused_before_anything_stands_in_the_new_one(tmp_path: Path) -> None:
    old, new = Outside(tmp_path / "old"), Outside(tmp_path / "new")
    give(old, "train", "small.yaml", at=130)
    assert alive(old) == 2
    elsewhere = KnownJob(name=JOB, store="memory://old", file=old.file, cloud=Cloud.LOCAL)
    new.home.remember(elsewhere)

    def command(name: str) -> Ended:
        strikes = Strikes()
        cloud = new.over(strikes)
        here = cloud.store_of
        cloud.store_of = lambda known: old.store if known.store == elsewhere.store else here(known)  # type: ignore[attr-defined, method-assign]
        return run((name, str(new.file)), cloud, strikes)

    refused = command("train")

    assert (refused.code, "is unfinished" in refused.stderr) == (UsageError.exit_code, True), refused.stderr
    assert new.store.list("") == ()
    assert new.home.find(JOB) == elsewhere
    first = command("plan").stderr.splitlines()[0]
    assert first.startswith(f"warning: small is a run of {old.file}: `gpucloud train` asks for another name")
    old.file.unlink()  # it is unfinished all the same
    first = command("plan").stderr.splitlines()[0]
    assert first.startswith(
        "warning: `gpucloud train` is refused: small is unfinished on local, its state in memory://"
    )


@pytest.mark.parametrize(
    ("open_attempt", "goes_on"),
    [
        (None, "goes on with it after step 3"),
        ({}, "goes on with it, or brings it to its end where its script is done by then"),
        ({"done_at": worlds.NOW}, "brings it to its end: its script is done"),
    ],
)
def test_a_plan_says_of_a_run_whose_attempt_is_open_no_more_than_it_knows(outside, open_attempt, goes_on):
    """Its script goes on, and saves, while nobody writes its state."""
    give(outside, "train", "small.yaml", at=200)
    jobs = JobStore(outside.store, JOB)
    loaded = jobs.load()
    assert loaded is not None
    attempts = () if open_attempt is None else (worlds.opened("a", **open_attempt),)
    saved = CheckpointRef(step=3, sha256="0" * 64)
    jobs.replace(replace(loaded[0], attempts=attempts, checkpoint=saved), loaded[1].version)
    said = give(outside, "plan", "small.yaml").stderr.splitlines()[0]
    assert said == f"small is unfinished: `gpucloud train` {goes_on}; this is the plan of a new run"


@pytest.mark.parametrize(
    ("attempt", "saved", "left"),
    [
        ({"last_step": 60, "total_steps": 100, "pace_s": 36.0}, 40, "60 of 100 steps, 36 min"),
        ({"last_step": 60, "total_steps": 100, "step_seconds": 36.0}, 40, "60 of 100 steps, 36 min"),
        ({"last_step": 60, "total_steps": 100, "pace_s": 36.0, "script": "another"}, 40, None),
        ({"last_step": 60, "total_steps": 100, "pace_s": 36.0, "script": ""}, 40, None),
        ({"last_step": 60, "total_steps": 100, "pace_s": 36.0, "done_at": worlds.NOW}, 40, None),
        ({"last_step": 60, "total_steps": 100}, 40, "60 of 100 steps\n"),
        ({"last_step": 60, "pace_s": 36.0}, 40, None),
        ({"last_step": 60, "total_steps": 100, "pace_s": 36.0}, None, "100 of 100 steps, 1 h"),
        ({"last_step": 100, "total_steps": 100, "pace_s": 36.0}, 100, None),
        ({"last_step": 6, "total_steps": 100, "counts": Counts.SAVES}, None, None),
    ],
)
def test_a_plan_of_an_unfinished_run_says_what_is_left_of_it_and_what_that_costs(outside, attempt, saved, left):
    give(outside, "train", "small.yaml", at=200)
    jobs = JobStore(outside.store, JOB)
    loaded = jobs.load()
    assert loaded is not None
    attempt = {"script": loaded[0].attempts[-1].script, "reason": ExitReason.LOST, **attempt}
    attempts = (worlds.opened("a", first_step=1, **attempt),)
    checkpoint = CheckpointRef(step=saved, sha256="0" * 64) if saved is not None else None
    jobs.replace(replace(loaded[0], attempts=attempts, checkpoint=checkpoint), loaded[1].version)
    said = give(outside, "plan", "small.yaml").stderr
    if left is None:
        assert "what is left" not in said
        return
    assert f"what is left of small by its last word: {left}" in said
    cost = re.search(r"at its pace so far and a start of [\w. ]+: about (\d\.\d+) USD at the price of now", said)
    assert (cost is not None) is ("," in left)
    if cost is not None:
        assert 0.1 < float(cost[1]) < 0.7  # at 0.54 USD an hour


def test_a_plan_says_what_is_left_as_its_machines_and_its_store_say_and_nothing_once_the_script_is_another(tmp_path):
    """Its supervisor was killed, its machines train on until they switch themselves off."""
    outside = Outside(tmp_path, training=Training(nodes=2, steps=4000, every=300, step_s=0.5))
    give(outside, "train", "small.yaml", at=250)
    step = int(give(outside, "status", "small").stdout.split("step ")[1].split()[0])
    assert step > 0
    left = f"what is left of small by its last word: {4000 - step} of 4000 steps"
    told = give(outside, "plan", "small.yaml").stderr
    assert left in told
    assert "and a start of" not in told
    for _ in range(30):
        outside.pass_by(300)
    saved = give(outside, "status", "small").stdout.split("step ")[1].split()[0]
    assert int(saved) > step
    told = give(outside, "plan", "small.yaml").stderr
    assert f"what is left of small by its last word: {4000 - int(saved)} of 4000 steps" in told
    (outside.file.parent / "train.py").write_text("STEPS = 9000")
    assert "what is left" not in give(outside, "plan", "small.yaml").stderr


def test_a_plan_says_first_that_a_start_would_be_refused_or_go_on(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    planned = give(outside, "plan", "small.yaml")
    assert (planned.code, planned.stdout.startswith("plan for small\n")) == (0, True)
    assert "gpucloud train" not in planned.stderr

    give(outside, "train", "small.yaml", at=200)
    goes_on = give(outside, "plan", "small.yaml").stderr.splitlines()[0]
    assert goes_on.startswith("small is unfinished: `gpucloud train` goes on with it")
    assert goes_on.endswith("; this is the plan of a new run")

    other = tmp_path / "two" / "small.yaml"
    other.parent.mkdir()
    other.write_text(outside.file.read_text())
    (other.parent / "train.py").touch()
    outside.file, outside.job = other, read_job(other)
    refused = give(outside, "plan", "small.yaml").stderr.splitlines()[0]
    assert refused.startswith("warning: small is a run of ")
    assert "`gpucloud train` asks for another name, or for --adopt" in refused


class Keyed(Rigged):
    """gpucloud of one process whose clusters have keys; `came` are the jobs that it supervised."""

    def __init__(self, outside: Outside, strikes: Strikes) -> None:
        super().__init__(outside, strikes)
        self.came: list[tuple[Job, bool]] = []

    def machine_key(self, known: Any) -> Path | None:
        return Gpucloud.machine_key(self, known)

    def services(self, job: Job, name: str, *, goes_on: bool = True, unattended: Any = None) -> Services:
        if goes_on:
            generate_key(self.home.key(name))
        self.came.append((job, goes_on))
        return super().services(job, name, goes_on=goes_on, unattended=unattended)


def come(outside: Outside, *words: str, at: int | None = None) -> tuple[Ended, list[tuple[Job, bool]]]:
    strikes = Strikes(at=at)
    cloud = Keyed(outside, strikes)
    return run(words, cloud, strikes), cloud.came


def test_a_start_says_once_until_when_its_machines_are_paid(outside: Outside) -> None:
    told = give(outside, "train", "small.yaml").stderr.partition("attempt 1 starts")[0]
    assert told.count("paid until") == 1, told


@pytest.fixture
def unheard(tmp_path: Path) -> Outside:
    """A job whose ranks are done, whose results are not home, and whose supervisor is gone."""
    outside = Outside(tmp_path, Training(nodes=2, steps=40, every=10, step_s=0.5))
    for at in range(150, 550, 10):
        come(outside, "train", str(outside.file), at=at)
        attempt = state(outside).attempt
        if attempt is not None and all(outside.fleet.machine(m.node_id).part for m in attempt.members):
            break
    outside.pass_by(60)
    return outside


def test_every_command_says_of_a_job_at_the_same_moment_that_it_stands_alike(unheard: Outside, monkeypatch) -> None:
    def visited(_: Gpucloud, __: KnownJob, report: JobReport) -> JobReport:
        fleet, nodes = unheard.fleet, [node.id for node in report.nodes]
        told = tuple(NodeStanding(node_id=node, status=fleet.status(GROUP, node)) for node in nodes)
        return replace(report, standing=told)

    monkeypatch.setattr("gpucloud.cli.target.visited_report", visited)
    asked = (("status", JOB), ("budget", JOB), ("cost", JOB), ("status",), ("cost", JOB, "--by", "node"))
    answers = [json.loads(give(unheard, *words, "--json").stdout) for words in asked]
    conditions = [one["jobs"][0]["condition"] if "jobs" in one else one["condition"] for one in answers]
    assert conditions == ["not_wound_up"] * 5
    assert give(unheard, "budget", JOB).stdout.startswith("small: trained, not wound up\n")


@pytest.fixture
def training(tmp_path: Path) -> Outside:
    """A job whose attempt runs, its code in a folder of its own, and whose supervisor is gone."""
    outside = Outside(tmp_path / "laptop", Training(nodes=2, steps=4000, every=1000, step_s=0.5))
    (outside.file.parent / "code").mkdir()
    (outside.file.parent / "train.py").rename(outside.file.parent / "code" / "train.py")
    write(outside, "code: code\noutputs: [results/]\n")
    for at in range(150, 550, 10):
        come(outside, "train", str(outside.file), at=at)
        attempt = state(outside).attempt
        if attempt is not None and all(outside.fleet.machine(m.node_id).part for m in attempt.members):
            break
    outside.pass_by(20)
    return outside


def order_its_end(outside: Outside) -> None:
    Orders(jobs=JobStore(outside.store, JOB), clock=outside.clock).end()


def pass_until_over(outside: Outside) -> tuple[str, list[Job]]:
    said, came = "", []
    for _ in range(10):
        ended, jobs = come(outside, "reconcile", JOB)
        said, came = said + ended.stderr, [*came, *(job for job, _ in jobs)]
        outside.pass_by(20)
        if state(outside).torn_down:
            break
    return said, came


def test_a_pass_that_goes_on_with_an_end_saves_by_the_code_in_the_store_where_the_folder_is_gone(training) -> None:
    order_its_end(training)
    shutil.rmtree(training.file.parent / "code")
    said, came = pass_until_over(training)

    [attempt] = state(training).attempts
    assert (state(training).torn_down, attempt.saved_step) == (True, attempt.last_step), said
    assert (came[0].code / "train.py").is_file()


@pytest.mark.parametrize("command", ["reconcile", "down"])
def test_whoever_cannot_save_a_job_that_is_to_end_says_why_and_ends_it(training, command) -> None:
    order_its_end(training)
    shutil.rmtree(training.file.parent / "code")
    shutil.rmtree(training.folder / "home" / "cache")
    for key in training.store.list(f"jobs/{JOB}/control/code/"):
        training.store.delete(key)
    before = state(training).checkpoint
    training.pass_by(600)
    newest = newest_commit(training.store, JobStore(training.store, JOB).checkpoints)
    assert newest is not None
    assert before is None or newest.step > before.step
    ended, _ = come(training, command, JOB)

    assert ended.stderr.count("is not there") == 1, ended.stderr
    assert "ending the machines without a last save" in ended.stderr
    assert (alive(training), state(training).torn_down) == (0, True)
    told = state(training)  # what the script saved when nobody listened is known all the same
    assert told.checkpoint is not None
    assert (told.checkpoint.step, told.attempts[-1].last_step) == (newest.step, newest.step)


def test_a_store_that_is_out_for_a_moment_costs_no_last_save(training, monkeypatch) -> None:
    order_its_end(training)
    shutil.rmtree(training.folder / "home" / "cache")

    def out(*_: object) -> bytes:
        raise StoreError("SlowDown", may_pass=True)

    with monkeypatch.context() as here:
        here.setattr(JobStore, "code", out)
        assert come(training, "reconcile", JOB)[0].code == StoreError.exit_code
    assert alive(training) == 2
    pass_until_over(training)
    [attempt] = state(training).attempts
    assert attempt.saved_step == attempt.last_step


@pytest.mark.parametrize(
    "words", [("train", "FILE"), ("train", "FILE", "--detach"), ("up", "FILE"), ("reconcile", JOB)]
)
def test_machines_whose_key_is_not_here_are_gone_on_with_by_nobody_and_no_key_is_made(training, words) -> None:
    key = training.home.key(JOB)
    key.unlink()
    before = JobStore(training.store, JOB).order()
    ended, came = come(training, *(str(training.file) if word == "FILE" else word for word in words))

    assert (ended.code, "SSH key is not here" in ended.stderr) == (CredentialsError.exit_code, True), ended.stderr
    assert (came, key.exists(), JobStore(training.store, JOB).order()) == ([], False, before)


@pytest.mark.parametrize("command", ["down", "reconcile"])
def test_a_job_is_ended_without_its_key_which_nobody_makes_for_that(training, command) -> None:
    key = training.home.key(JOB)
    key.unlink()
    order_its_end(training)
    ended, _ = come(training, command, JOB)

    assert "SSH key is not here" in ended.stderr
    assert (alive(training), state(training).torn_down, key.exists()) == (0, True, False)


def test_what_ends_a_job_makes_no_key_and_what_begins_one_does(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("GPUCLOUD_SSH_KEY", raising=False)
    (tmp_path / "job.yaml").write_text("name: digits\nbudget: 1USD\nrun: train.py\n")
    (tmp_path / "train.py").touch()
    cloud = Gpucloud(Home(tmp_path / "home"))
    job = replace(cloud.read_job(tmp_path / "job.yaml"), store=str(tmp_path / "store"))

    ends = cloud.services(job, "digits", goes_on=False)
    assert (ends.public_key, ends.key, cloud.home.key("digits").exists()) == ("", b"", False)
    begins = cloud.services(job, "digits")
    again = cloud.services(job, "digits", goes_on=False)
    assert begins.public_key.startswith("ssh-ed25519 ")
    assert (again.public_key, again.key) == (begins.public_key, begins.key)


def test_whoever_supervises_a_job_knows_how_its_script_saves(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: digits\nbudget: 1USD\nrun: train.py\n")
    for text, saving in (("from gpucloud import resume\n", Saving.RESUME), ("import torch\n", Saving.NOTHING)):
        (tmp_path / "train.py").write_text(text)
        cloud = Gpucloud(Home(tmp_path / "home"))
        job = replace(cloud.read_job(tmp_path / "job.yaml"), store=str(tmp_path / "store"))
        assert cloud.services(job, "digits", goes_on=False).saving is saving


class Beside:
    """A process in the background: over the same fakes, with what is meant to befall it; it has ended at once."""

    pid = 7

    def __init__(self, befalls: Callable[[], Ended], stdout: Any) -> None:
        ended = befalls()
        stdout.write(f"{ended.stderr}{ended.stdout}".encode())
        self.returncode = ended.code

    def poll(self) -> int:
        return self.returncode


def detach(outside: Outside, befalls: Callable[[tuple[str, ...]], Ended], *words: str) -> Ended:
    def child(argv: Sequence[str], *, stdout: Any, **_: object) -> Beside:
        return Beside(lambda: befalls(tuple(argv[3:])), stdout)

    with mock.patch("gpucloud.cli.commands.supervising.subprocess", SimpleNamespace(Popen=child, DEVNULL=-3)):
        return give(outside, "train", "small.yaml", "--detach", *words)


def stopped(outside: Outside) -> None:
    """Have the job end by `down`, some of its steps done."""
    give(outside, "train", "small.yaml", at=130)
    assert give(outside, "down", JOB).code == 0
    assert state(outside).exit_code == ExitReason.STOPPED.exit_code


def test_what_keeps_the_process_in_the_background_from_a_job_is_the_answer_of_detach(outside, monkeypatch) -> None:
    write(outside, f"secrets: [{SECRET}]\n")
    monkeypatch.setenv(SECRET, "x")
    stopped(outside)

    def without_it(words: tuple[str, ...]) -> Ended:
        monkeypatch.delenv(SECRET)
        return give(outside, *words)

    ended = detach(outside, without_it)
    assert (ended.code, SECRET in ended.stderr) == (UsageError.exit_code, True), ended.stderr
    assert "in the background" not in ended.stdout
    monkeypatch.setenv(SECRET, "x")
    told = json.loads(detach(outside, without_it, "--json").stdout)["error"]
    assert (told["code"], told["exit_code"]) == ("usage", 2)
    assert SECRET in told["message"]


def test_a_process_in_the_background_that_is_killed_at_once_is_no_success(outside: Outside) -> None:
    stopped(outside)
    ended = detach(outside, lambda _: Ended(code=-9, stdout="", stderr="{\n[]\n"))
    assert (ended.code, "ended at once with code -9" in ended.stderr) == (1, True), ended.stderr


@pytest.mark.parametrize("reason", [ExitReason.SUCCEEDED, ExitReason.IDLE])
def test_a_job_that_is_over_before_anybody_looks_is_told_as_it_ended(tmp_path: Path, reason: ExitReason) -> None:
    outside = Outside(tmp_path, Training(steps=200, gpu_use=5 if reason is ExitReason.IDLE else 90))
    write(outside, "idle: {below: 30, for: 1 min}\n")
    ended = detach(outside, lambda words: give(outside, *words))

    assert (ended.code, state(outside).exit_reason, state(outside).torn_down) == (reason.exit_code, reason, True)
    assert state(outside).status.value in ended.stdout
    assert "in the background" not in ended.stdout


def test_a_run_that_lacks_its_teardown_alone_is_torn_down_whatever_one_would_cost_now(outside, monkeypatch) -> None:
    destroy = outside.provisioner.destroy

    def fails(group: str, *, story: Any) -> None:
        raise ProvisionError("DependencyViolation", hint="again")

    outside.provisioner.destroy = fails  # type: ignore[method-assign]
    cut_short, _ = come(outside, "train", str(outside.file))
    assert (state(outside).exit_reason, state(outside).torn_down) == (ExitReason.SUCCEEDED, False)
    assert "\n`gpucloud down small` removes what is left on the cloud\n" in cut_short.stderr

    outside.provisioner.destroy = destroy  # type: ignore[method-assign]
    monkeypatch.setattr(outside.market, "offers", lambda _: ())
    write(outside, f"secrets: [{SECRET}]\n")
    outside.home.key(JOB).unlink()
    shutil.rmtree(outside.folder / "home" / "cache")
    ended, came = come(outside, "train", str(outside.file))
    assert (state(outside).torn_down, outside.cloud.describe(GROUP).exists) == (True, False), ended.stderr
    assert (ended.code, "what is left of small is torn down first" in ended.stderr) == (2, True)  # a new run costs that
    assert [goes_on for _, goes_on in came] == [False]


def test_a_job_that_is_ended_unsaved_names_its_outputs_as_missing(training) -> None:
    order_its_end(training)
    training.home.key(JOB).unlink()
    ended, _ = come(training, "down", JOB)
    assert (
        "outputs: results/ did not come home: whatever the script had written there by then went with the machines of"
        in ended.stdout
    ), ended.stderr


def test_a_damaged_order_that_is_replaced_leaves_the_run_its_number(outside: Outside) -> None:
    for name, number in ((f"{JOB}-2", 2), (f"{JOB}-3", 3)):
        put_job(JobStore(outside.store, name), worlds.state(job=name), base=JOB, run=number)
    outside.store.put(f"jobs/{JOB}-3/control/order.json", b"{?")
    Orders(jobs=JobStore(outside.store, f"{JOB}-3"), clock=outside.clock).end_in_place(outside.job, "here")

    found = current_run(outside.store, JOB, outside.clock)
    assert found is not None
    assert (found.name, found.given.order.base, found.given.order.run) == (f"{JOB}-3", JOB, 3)


@pytest.mark.parametrize(
    ("base", "name", "run"),
    [("gpt", "gpt", 1), ("gpt", "gpt-12", 12), ("gpt-2", "gpt-2", 1), ("gpt", "gpt-x", None), ("gpt", "other-2", None)],
)
def test_a_runs_number_is_told_by_its_name(base: str, name: str, run: int | None) -> None:
    assert run_of(base, name) == run


AWAY = StoreError("/disk is not there", hint="mount it again", may_pass=True)
LOGIN = CredentialsError("the session has expired", hint="log in")
DENIED = ClientError({"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "PutObject")


@pytest.mark.parametrize(
    ("error", "cause", "first", "ends"),
    [
        (AWAY, None, "once its store answers again: ", False),
        (LOGIN, None, "once its credentials are valid again: ", False),
        (StoreError("AccessDenied"), DENIED, "once you may write to its store again: ", False),
        (StoreError("full"), OSError(errno.ENOSPC, "No space left on device"), "", True),
        (NoBucket("no bucket"), None, "once its store answers again: ", False),
        (StoreError("cannot read /disk: Input/output error"), None, "once its store answers again: ", False),
    ],
)
def test_who_loses_the_store_of_a_job_is_told_when_the_commands_that_are_named_do_what_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: GpucloudError,
    cause: Exception | None,
    first: str,
    ends: bool,
) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=4000, every=100, step_s=0.5))
    began, lost = outside.clock.now(), ("put",) if cause is not None else ("put", "get", "list", "delete")

    def refused(call: Any, *args: Any, **options: Any) -> Any:
        if outside.clock.now() - began > timedelta(seconds=100):
            raise error from cause
        return call(*args, **options)

    with monkeypatch.context() as patched:
        for name in lost:
            patched.setattr(outside.store, name, partial(refused, getattr(outside.store, name)))
        told = give(outside, "train", "small.yaml").stderr
        assert f"\n{first}`gpucloud train small` goes on, `gpucloud down small` ends them now\n" in told
        give(outside, "down", "small")
        assert alive(outside) == (0 if ends else 2)
    assert give(outside, "down", "small").code == 0
    assert alive(outside) == 0


@pytest.mark.parametrize("away", [True, False])
def test_what_ended_a_session_is_told_and_a_store_that_was_just_away_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=4000, every=100, step_s=0.5))
    tries = list[object]()

    def gone() -> StoreError:
        for key in [] if away else list(outside.store.list("jobs/small/")):
            outside.store.delete(key)
        return StoreError("the manifest of a checkpoint is damaged", may_pass=away)

    monkeypatch.setattr(Supervisor, "tick", _until(outside, timedelta(seconds=100), gone))
    monkeypatch.setattr(JobStore, "try_to_keep", lambda _, state: tries.append(state))
    ended_by = give(outside, "train", "small.yaml")
    assert (ended_by.code, "the manifest of a checkpoint is damaged" in ended_by.stderr) == (15, True)
    assert not tries


@pytest.mark.parametrize(
    ("first", "edited", "refused"),
    [
        ("train.py --steps 400", "train.py --steps 40", "steps"),
        ("train.py --lr=1 --max_steps=400", "train.py --lr=1 --max_steps=40", "max_steps"),
        ("train.py trainer.max-steps=400", "train.py trainer.max-steps=40", "max-steps"),
        ("train.py\nenv: {MAX_STEPS: '400'}", "train.py\nenv: {MAX_STEPS: '40'}", "MAX_STEPS"),
        ("train.py --steps 400", "train.py --steps 300", None),
        ("train.py --eval_steps 400", "train.py --eval_steps 40", None),  # not how many there are
        ("train.py --steps 800", "train.py --steps 40", None),  # nor this, by what the script told
        ("train.py --steps 400 --epochs 1", "train.py --steps 40 --epochs 9", None),
        ("train.py --steps 400", "other.py --steps 40", None),
        # What a directory kept, or what nothing is put back of, is not gone on from.
        ("train.py --steps 400\ncheckpoint: {directory: out}", "train.py --steps 40\ncheckpoint: none", None),
        ("train.py --steps 400\ncheckpoint: {directory: out}", "train.py --steps 40", None),
        ("train.py --steps 400", "train.py --steps 40\ncheckpoint: none", None),
        ("train.py --steps 400", "train.py --steps 40\ncheckpoint: {every: 1m}", "steps"),
    ],
)
def test_a_run_that_was_made_shorter_than_what_it_has_saved_is_refused_before_a_machine_is_rented(
    tmp_path: Path, first: str, edited: str, refused: str | None
) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=400, every=100, step_s=0.5))
    said = outside.file.read_text()

    def runs(line: str) -> None:
        outside.file.write_text(said.replace("run: train.py", f"run: {line}"))
        outside.job = read_job(outside.file)

    (outside.file.parent / "other.py").touch()
    runs(first)
    with mock.patch.object(Supervisor, "tick", _until(outside, timedelta(seconds=150))):
        give(outside, "train", "small.yaml")
    assert give(outside, "down", "small").code == 0
    checkpoint = state(outside).checkpoint
    assert checkpoint is not None
    assert 100 <= checkpoint.step < 300
    runs(edited)
    before = outside.store.get("jobs/small/control/order.json")
    told = give(outside, "train", "small.yaml")
    if refused is None:
        assert told.code == 0
        return
    assert told.code == 2
    assert (
        f"the checkpoint of small is of step {checkpoint.step}, and `{refused}` is 40 now: it is over already"
        in told.stderr
    )
    assert alive(outside) == 0
    assert outside.store.get("jobs/small/control/order.json") == before


def _until(
    outside: Outside, span: timedelta, fault: Callable[[], StoreError] = lambda: StoreError("the store is away")
) -> Callable[[Supervisor], Any]:
    """Return a supervisor's tick that works for that span of the job's clock, and then fails."""
    tick, began = Supervisor.tick, outside.clock.now()

    def ticks(self: Supervisor) -> Any:
        if outside.clock.now() - began > span:
            raise fault()
        return tick(self)

    return ticks


@pytest.mark.parametrize(
    ("unreached", "first"),
    [
        (None, ""),
        ("s3://of-another", "s3://of-another was not reached; if its store, s3://of-the-job/store, is: "),
        ("s3://of-the-job", "once its store answers again: "),  # the same bucket
        ("s3://of-the", "s3://of-the was not reached; if its store, s3://of-the-job/store, is: "),
    ],
)
def test_a_store_in_s3_is_neither_waited_for_nor_told_as_away_where_that_of_its_data_there_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreached: str | None, first: str
) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=4000, every=100, step_s=0.5))
    tries = list[object]()

    def gone() -> StoreError:
        outside.store.url = "s3://of-the-job/store"
        return DataStoreError("cannot list objects in s3://of-another", may_pass=True, unreached=unreached)

    monkeypatch.setattr(Supervisor, "tick", _until(outside, timedelta(seconds=100), gone))
    monkeypatch.setattr(JobStore, "try_to_keep", lambda _, state: tries.append(state))
    told = give(outside, "train", "small.yaml").stderr
    assert f"\n{first}`gpucloud train small` goes on, `gpucloud down small` ends them now\n" in told
    assert len(tries) == (1 if unreached is None else 0)


@pytest.mark.parametrize(
    "theirs",
    [
        StoreError("s3://of-another/data: AccessDenied"),
        DataStoreError("cannot list objects in s3://of-another: SlowDown", may_pass=True),
        DataStoreError("cannot list objects in s3://of-another: timed out", may_pass=True, unreached="s3://of-another"),
    ],
)
def test_another_store_that_refuses_a_read_or_is_away_is_not_told_as_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: StoreError
) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=4000, every=100, step_s=0.5))
    began, tick = outside.clock.now(), Supervisor.tick

    def refused(self: Supervisor) -> Any:
        if outside.clock.now() - began > timedelta(seconds=100):
            raise theirs from DENIED
        return tick(self)

    with monkeypatch.context() as patched:
        patched.setattr(Supervisor, "tick", refused)
        told = give(outside, "train", "small.yaml").stderr
    assert "\n`gpucloud train small` goes on, `gpucloud down small` ends them now\n" in told
    assert (give(outside, "down", "small").code, alive(outside)) == (0, 0)
