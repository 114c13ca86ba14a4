"""`gpucloud checkpoints` of a job whose store is a bucket: listed, verified, pulled, exported, pruned, and refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucloud.domain.checkpoint.manifest import Commit, data_key
from gpucloud.domain.checkpoint.objects import read_header
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from tests.commandline import weights
from tests.lab.aws.world import ACCESS_KEY
from tests.standins.aws import Account, account

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

PREFIX = "jobs/small/checkpoints"
READS = {"GetObject", "ListObjectsV2", "HeadObject", "GetCallerIdentity", "GetBucketLocation", "HeadBucket"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """A job of 25 steps, saved every ten, that has succeeded."""
    with account(tmp_path_factory.mktemp("aws")) as aws:
        answer = aws.line.run("train", aws.job(steps=25, step_s=0.0), limit_s=1800)
        assert answer.code == 0, answer.stderr
        yield aws


def test_the_list_says_what_each_was_saved_for(ended: Account) -> None:
    found = ended.line.run("checkpoints", "small", "--json").json
    assert found["store"] == f"s3://{ended.bucket}"
    assert [(one["step"], one["ranks"], one["objects"], one["why"]) for one in found["checkpoints"]] == [
        (25, 2, 2, "last"),
        (20, 2, 2, "due"),
        (10, 2, 2, "due"),
    ]


def test_what_is_read_is_verified_and_nothing_in_the_bucket_changes(ended: Account, tmp_path: Path) -> None:
    before, asked = _objects(ended), len(ended.lab.calls)
    assert ended.line.run("checkpoints", "small", "--verify").stdout.startswith("whole: step 25, 20, 10; 6 objects, ")
    assert ended.line.run("checkpoints", "small", "--pull", str(tmp_path / "here"), "--step", "20").code == 0
    assert ended.line.run("checkpoints", "small", "--export", str(tmp_path / "w.safetensors")).code == 0
    mine = [call for call in ended.lab.calls[asked:] if call.key == ACCESS_KEY]
    written = [str(call.params["Key"]) for call in mine if call.action not in READS]
    assert all("/control/ledger/outside_budget/pull-" in key for key in written)  # what a pull costs is of the bill
    assert _objects(ended) == before

    here = StoredCheckpoints(store=DirectoryStore(tmp_path / "here"), prefix="", keep=3)
    (one,) = here.standing()
    assert (one.commit, here.verify(one.sound.pieces)) == (Commit(1, 20), ())
    data = (tmp_path / "w.safetensors").read_bytes()
    header = read_header(data, len(data))
    tensors = b"".join(data[header.start + t.begin : header.start + t.end] for t in header.tensors)
    assert hashlib.sha256(tensors).hexdigest() == weights(ended.line)  # as the script itself printed


def test_pruning_deletes_what_was_never_committed_and_keeps_the_rest(ended: Account) -> None:
    s3 = ended.lab.client("s3")
    torn = f"{PREFIX}/{data_key(Commit(1, 22), 'rank-00000-of-00002.safetensors')}"
    s3.put_object(Bucket=ended.bucket, Key=torn, Body=b"torn")
    before = _objects(ended)
    answer = ended.line.run("checkpoints", "small", "--prune", "--json")
    assert (answer.code, answer.json["unfinished_objects"], answer.json["deleted"]) == (0, 1, False)
    assert _objects(ended) == before
    assert ended.line.run("checkpoints", "small", "--prune", "--yes", "--json").json["deleted"] is True
    assert before - _objects(ended) == {torn}


def test_damage_and_missing_rights_are_one_line_and_a_hint(ended: Account, tmp_path: Path) -> None:
    s3 = ended.lab.client("s3")
    key = data_key(Commit(1, 25), "rank-00001-of-00002.safetensors")
    with s3.get_object(Bucket=ended.bucket, Key=f"{PREFIX}/{key}")["Body"] as body:
        data = bytearray(body.read())
    data[-1] ^= 1
    s3.put_object(Bucket=ended.bucket, Key=f"{PREFIX}/{key}", Body=bytes(data))
    answer = ended.line.run("checkpoints", "small", "--verify")
    assert (answer.code, answer.stdout) == (15, f"part 1 of 1 of {key} is not as it was written\n")
    answer = ended.line.run("checkpoints", "small", "--pull", str(tmp_path / "here"))
    assert answer.code == 15
    assert f"the checkpoint is damaged: part 1 of 1 of {key}" in answer.stderr
    assert not list((tmp_path / "here").glob("commit/*/*"))
    for action in ("GetObject", "ListObjectsV2"):
        ended.lab.faults.add(action=action, code="AccessDenied", status=403, times=999)
        answer = ended.line.run("checkpoints", "small", "--verify")
        ended.lab.faults.clear()
        assert (answer.code, answer.stdout) == (15, "")
        assert "AccessDenied" in answer.stderr
        assert "hint: let this identity get, put, list and delete objects" in answer.stderr


def _objects(aws: Account) -> set[str]:
    pages = aws.lab.client("s3").get_paginator("list_objects_v2").paginate(Bucket=aws.bucket, Prefix=PREFIX)
    return {entry["Key"] for page in pages for entry in page.get("Contents", ())}
