"""`data:` on the emulated AWS: a bucket of the user's, read by the machines with their role, once by each of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpucloud.adapters.aws.policy import actions, boundary_arn, node_policy, user_policy
from gpucloud.adapters.aws.statements import Uses
from tests.commandline import Answer
from tests.iam.actions import action_of
from tests.lab.aws import Call
from tests.lab.aws.lab import ACCESS_KEY, OWN_AGENT
from tests.standins.aws import Account, account

# The job itself runs in the first test's time. The embedded fleet stages data in every run of the tests.
pytestmark = [pytest.mark.slow]

LARGE = "imagenet/deep/large"  # so large that it is fetched in parts
FILES = {**{f"imagenet/part-{n}": os.urandom(1_000_000) for n in range(6)}, LARGE: os.urandom(70 << 20)}
NEIGHBOUR = "imagenet-private/secret"
# Before the training script proper: what this rank's machine has of the set.
READS = """
import hashlib as _hashlib, os as _os, pathlib as _pathlib
_folder = _pathlib.Path(_os.environ["GPUCLOUD_DATA"])
_seen = sorted((str(p.relative_to(_folder)), _hashlib.sha256(p.read_bytes()).hexdigest())
               for p in _folder.rglob("*") if p.is_file() and not p.name.startswith("."))
print("set", _hashlib.sha256(repr(_seen).encode()).hexdigest(), flush=True)
"""


@dataclass
class Staged:
    """A job with a data set, run once, with one machine taken on the way."""

    aws: Account
    answer: Answer
    reads: list[Call]
    target: Path


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    folder = tmp_path_factory.mktemp("data")
    target = folder / "sets" / "imagenet"  # emulated machines share this one's `/`
    with account(folder, uses=Uses(data=("sets",))) as aws:
        s3 = aws.lab.client("s3")
        s3.create_bucket(Bucket="sets")
        for key, data in {**FILES, NEIGHBOUR: b"not yours"}.items():
            s3.put_object(Bucket="sets", Key=key, Body=data)
        file = aws.job(steps=60, step_s=0.03, extra=f"cloud: aws\ndata: {{s3://sets/imagenet: {target}}}\n")
        script = aws.line.folder / "code" / "train.py"
        script.write_text(READS + script.read_text())
        answer = aws.line.run("train", file, "--drill", "--json", limit_s=500)
        reads = [
            c for c in aws.lab.calls if c.params.get("Bucket") == "sets" and OWN_AGENT not in c.agent and c.status < 300
        ]
        yield Staged(aws, answer, [c for c in reads if c.action == "GetObject"], target)


def test_the_job_ends_well_over_an_interruption_and_says_what_was_staged(staged: Staged) -> None:
    assert staged.answer.code == 0, staged.answer.stderr
    assert [a["reason"] for a in staged.answer.json["attempts"]] == ["interrupted", "succeeded"]
    assert "data: s3://sets/imagenet: 7 files, 79.4 MB, staged on every node" in staged.answer.stderr
    # A machine that staged it by itself, before the supervisor came, says so in its own log only.
    assert staged.answer.stderr.count(f" data: {staged.target}: 79.4 MB in ") <= 3


def test_every_rank_of_every_attempt_saw_exactly_what_is_in_the_bucket(staged: Staged) -> None:
    names = {key.removeprefix("imagenet/"): data for key, data in FILES.items()}
    expected = hashlib.sha256(
        repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in names.items())).encode()
    ).hexdigest()
    for attempt in ("1", "2"):
        for rank in ("0", "1"):
            said = staged.aws.line.run("logs", "small", "--attempt", attempt, "--rank", rank).stdout
            assert f"set {expected}" in said.splitlines()


def test_no_machine_fetches_a_byte_twice(staged: Staged) -> None:
    fetched: dict[str, Counter[str]] = {}
    for call in staged.reads:
        fetched.setdefault(call.key, Counter())[str(call.params["Key"])] += 1
    once = Counter({**dict.fromkeys(FILES, 1), LARGE: 5})  # 70 MiB in parts of 16
    assert all(machine <= once for machine in fetched.values())
    # Two machines, and the one that came for the one that was taken; each with keys of its own.
    assert sum(machine == once for machine in fetched.values()) >= 3
    assert len(fetched) <= len(staged.aws.ever("small"))


def test_each_machine_keeps_the_set_on_its_own_disk(staged: Staged) -> None:
    marks = list((staged.aws.lab.folder / "machines").glob("*/disk/gpucloud-data/*/.gpucloud-data.json"))
    assert len({mark.parents[2] for mark in marks}) >= 3
    assert all(len(json.loads(mark.read_text())["files"]) == 7 for mark in marks)


def test_the_policies_allow_this_and_not_the_neighbour(staged: Staged) -> None:
    who = {"partition": "aws", "account": "123456789012", "regions": ("us-east-1",)}
    calls = [call for call in staged.aws.lab.calls if OWN_AGENT not in call.agent]
    mine = {a for call in calls if call.key == ACCESS_KEY for a in action_of(call.service, call.action, call.params)}
    theirs = {a for call in calls if call.key != ACCESS_KEY for a in action_of(call.service, call.action, call.params)}
    node = node_policy(**who, cluster="gpucloud-small", bucket=staged.aws.bucket, data=("s3://sets/imagenet",))
    assert (
        sorted(
            mine
            - actions(
                *user_policy(**who, boundary=boundary_arn("aws", who["account"]), uses=Uses(data=("sets",))).values()
            )
        )
        == []
    )
    assert sorted(theirs - actions(node)) == []
    (said,) = [one for one in node["Statement"] if one["Sid"] == "Data"]
    assert said["Resource"] == ["arn:aws:s3:::sets/imagenet", "arn:aws:s3:::sets/imagenet/*"]
