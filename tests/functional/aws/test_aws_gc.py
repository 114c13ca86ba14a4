"""`gc` and what `down` lists on the emulated AWS: things of every kind, found by their tags, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gpucloud.adapters.aws.bucket import ensure_bucket
from gpucloud.adapters.aws.census import AwsCensus
from gpucloud.adapters.aws.policy import actions, boundary_arn, user_policy
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.supervision.strays import Owner
from gpucloud.store import ObjectStore, open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.machines import Sweeper
from tests.awsrig import provisioner
from tests.commandline import Answer, until
from tests.fakes.clock import JumpingClock
from tests.iam.actions import action_of
from tests.lab.aws import Lab
from tests.lab.aws.lab import OWN_AGENT
from tests.lab.aws.world import REGION
from tests.standins.aws import Account, account
from tests.standins.aws_group import Rig
from tests.standins.aws_strays import KINDS, Hand, tags
from tests.unit.worlds import NOW, POOL, state

# Connections of clients that nobody closes: boto3 leaves that to the end of the process.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

NUMBER = "123456789012"
ALLOWED = actions(
    *user_policy(partition="aws", account=NUMBER, regions=(REGION,), boundary=boundary_arn("aws", NUMBER)).values()
)


class Memory:
    """Sightings of this test."""

    def __init__(self) -> None:
        self.kept: Mapping[str, datetime] = {}

    def load(self, owner: Owner) -> Mapping[str, datetime]:
        return self.kept

    def save(self, owner: Owner, first_seen: Mapping[str, datetime]) -> None:
        self.kept = first_seen


def census(lab: Lab, home: Path, store: ObjectStore, *regions: str) -> AwsCensus:
    aws = Aws(region=REGION)
    made = provisioner(home, store=store.url)
    return AwsCensus(aws, NUMBER, regions or (REGION,), group=Rig(lab).group(), provisioner=made)


def living(store: ObjectStore, job: str, region: str = REGION) -> None:
    pool = replace(POOL, zone=f"{region}a")
    JobStore(store, job).create(state(job=job, pool=pool, group=f"{region}/gpucloud-{job}"))


def needed(lab: Lab, since: int) -> set[str]:
    """The rights that the calls of gpucloud after the first `since` needed."""
    own = [call for call in lab.calls[since:] if OWN_AGENT not in call.agent]
    return {action for call in own for action in action_of(call.service, call.action, call.params)}


def test_every_kind_is_found_by_its_tags_and_only_what_is_of_no_living_job_of_this_store(
    lab: Lab, tmp_path: Path
) -> None:
    store = open_store(f"s3://{ensure_bucket(Aws(region=REGION), REGION)}")
    living(store, "alive")
    living(store, "moved", "us-west-2")
    hand = Hand(lab)
    made = hand.of("gpucloud-lost", tags("lost", store.url)).all()
    hand.of("gpucloud-alive", tags("alive", store.url)).all()
    hand.of("gpucloud-theirs", tags("theirs", "s3://somebody-elses")).all()
    hand.of("gpucloud-by-hand", {}).all()
    hand.of("gpucloud-alike", tags("alike", store.url, managed="True")).role()
    bare, moved = (hand.of(f"gpucloud-{job}", tags(job, store.url)) for job in ("bare", "moved"))
    rest = {("role", bare.role()), ("instance-profile", bare.profile()), ("volume", moved.volume())}
    before = len(lab.calls)
    looked = census(lab, tmp_path, store)
    sweeper = Sweeper(census=looked, store=store, clock=JumpingClock(NOW), sightings=Memory(), story=lambda line: None)

    swept = sweeper.look()

    assert {(thing.kind, thing.id) for thing in swept.strays} == {*made.items(), *rest}
    assert (set(made), len(swept.foreign), swept.ripe) == (KINDS, len(KINDS) + 1, ())
    assert needed(lab, before) - ALLOWED == set()
    assert {(thing.kind, thing.id) for thing in looked.of_cluster("gpucloud-lost")} == set(made.items())
    assert {thing.kind for thing in looked.of_cluster("gpucloud-bare")} == {"role", "instance-profile"}
    assert needed(lab, before) - ALLOWED == set()


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[Account]:
    with account(tmp_path) as found:
        yield found


def killed(aws: Account) -> None:
    """A job of two machines whose command was killed while it trained."""
    train = aws.line.start("train", aws.job(steps=4000, step_s=0.05))
    until(lambda: train.poll() is not None or aws.step("small") >= 1, "step 1", 400)
    assert train.poll() is None, aws.story
    os.killpg(train.pid, signal.SIGKILL)
    train.wait()


def age(aws: Account) -> None:
    """Let the first look have been 61 s ago."""
    path = aws.line.home / "sightings.json"
    kept = json.loads(path.read_text())
    earlier = timedelta(seconds=61)
    aged = {
        owner: {key: (datetime.fromisoformat(at) - earlier).isoformat() for key, at in seen.items()}
        for owner, seen in kept.items()
    }
    path.write_text(json.dumps(aged))


def gc(aws: Account, *more: str) -> Answer:
    return aws.line.run("gc", "--cloud", "aws", "--region", REGION, *more, "--json", limit_s=500)


def kinds(answer: Answer) -> list[str]:
    return sorted(one["kind"] for one in answer.json["strays"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_of_a_killed_run_whose_state_is_lost_goes_after_two_looks_and_nothing_else(aws: Account) -> None:
    killed(aws)
    assert (gc(aws).code, gc(aws).json["strays"]) == (0, [])  # a living job's
    store = f"s3://{aws.bucket}"
    aws.lab.client("s3").delete_object(Bucket=aws.bucket, Key="jobs/small/state.json")
    hand = Hand(aws.lab)
    forgotten = hand.of("gpucloud-small", tags("small", store))
    apart = {forgotten.volume(), forgotten.interface()}
    theirs = hand.of("gpucloud-theirs", tags("theirs", "s3://somebody-elses")).all()
    before = len(aws.lab.calls)

    first = gc(aws, "--yes")
    assert first.code == 30, first.stderr
    assert set(kinds(first)) == KINDS - {"placement-group"}  # machines of this type are in none
    assert len([kind for kind in kinds(first) if kind == "instance"]) == len(aws.alive("small")) == 2
    assert {one["cluster"] for one in first.json["strays"]} == {"gpucloud-small"}
    assert apart < {one["id"] for one in first.json["strays"]}
    age(aws)
    second = gc(aws, "--yes")

    assert (second.code, second.json["strays"]) == (0, []), second.stderr
    left = aws.lab.inventory()
    assert not [line for line in left if "gpucloud-small" in line or set(line.split()) & apart]
    assert [id_ for id_ in theirs.values() if not any(id_ in line.split() for line in left)] == []
    assert aws.running == [theirs["instance"]]
    assert needed(aws.lab, before) - ALLOWED == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_down_names_what_it_did_not_make_and_gc_removes_it(aws: Account) -> None:
    killed(aws)
    forgotten = Hand(aws.lab).of("gpucloud-small", tags("small", f"s3://{aws.bucket}"))
    volume, interface = forgotten.volume(), forgotten.interface()

    down = aws.line.run("down", "small", "--json", limit_s=500)
    assert down.code == 30, down.stderr
    assert f"still listed: volume {volume}, network-interface {interface}\n" in down.stderr
    assert aws.alive("small") == []
    assert gc(aws).code == 30
    age(aws)
    gone = gc(aws, "--yes")

    assert (gone.code, gone.json["strays"]) == (0, []), gone.stderr
    assert not [line for line in aws.lab.inventory() if volume in line or interface in line or "gpucloud-small" in line]
    again = aws.line.run("down", "small", "--json", limit_s=500)
    assert (again.code, again.json["left_over"]) == (0, []), again.stderr
