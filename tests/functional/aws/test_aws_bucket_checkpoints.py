"""`gpucloud checkpoints` over a bucket as gpucloud hardens it: every request that it makes, and none that changes."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from moto.s3.models import s3_backends

from gpucloud.adapters.aws.bucket import ensure_bucket
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.home import open_home
from gpucloud.cli.commands.checkpoints import Asked, checkpoints
from gpucloud.domain.checkpoint.manifest import Commit, data_key
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.offer import Market, Pool
from gpucloud.domain.state.state import JobState
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.lab.aws import Lab
from tests.standins.made_checkpoints import Made, state
from tests.unit.worlds import put_job

BORN = datetime(2026, 1, 2, tzinfo=timezone.utc)
POOL = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
CALLS = {"GetObject", "ListObjectsV2", "PutObject"}


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    """An ended job with checkpoints of steps 10 to 40, and a part of one that was never committed."""
    s3_backends["123456789012"]["aws"].reset()
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}")
    found = JobStore(store, "made")
    put_job(found, JobState(job="made", pool=POOL, cap_usd_per_hour=Decimal(1)))
    open_home().remember(KnownJob(name="made", store=store.url, file=tmp_path / "gone.yaml", cloud=Cloud.AWS))
    for step in (10, 20, 30, 40):
        one = Made(store, found.checkpoints, Commit(1, step))
        metadata = state(one)
        one.put([list(one.tensors)], metadata)
    store.put(f"{found.checkpoints}/{data_key(Commit(1, 50), 'rank-00000-of-00001.safetensors')}", b"torn")
    return found


def answer(capsys: pytest.CaptureFixture[str], **asked: Any) -> tuple[int, dict[str, Any]]:
    code = checkpoints("made", Asked(**asked), as_json=True)
    return code, json.loads(capsys.readouterr().out)


def test_reading_asks_for_objects_and_lists_and_writes_what_the_way_home_costs_alone(
    lab: Lab, jobs: JobStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, asked = set(jobs.store.list("")), len(lab.calls)
    code, found = answer(capsys)
    assert (code, found["store"]) == (0, jobs.store.url)
    assert [(one["step"], one["marks"]) for one in found["checkpoints"]] == [
        (40, ["next", "kept"]),
        (30, ["kept"]),
        (20, ["kept"]),
        (10, []),
    ]
    assert answer(capsys, verify=True)[0] == 0
    pulled = answer(capsys, pull=tmp_path / "here", step=20)[1]
    assert pulled["bytes"] == pulled["fetched_bytes"] > 0
    assert answer(capsys, export=tmp_path / "w.safetensors")[1]["tensors"] == 3
    assert answer(capsys, prune=True)[1]["unfinished_objects"] == 1
    assert {call.action for call in lab.calls[asked:]} <= CALLS
    assert {key.rpartition("/")[0] for key in set(jobs.store.list("")) - before} == {
        "jobs/made/control/ledger/outside_budget"
    }
    assert before <= set(jobs.store.list(""))


def test_pruning_deletes_what_is_not_kept(jobs: JobStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, prune=True, yes=True)[1]["deleted"] is True
    assert [one["step"] for one in answer(capsys)[1]["checkpoints"]] == [40, 30, 20]
    assert not [key for key in jobs.store.list("") if "000000050" in key or "000000010" in key]


def test_a_damaged_object_is_named(jobs: JobStore, capsys: pytest.CaptureFixture[str]) -> None:
    key = data_key(Commit(1, 30), "rank-00000-of-00001.safetensors")
    stored = jobs.store.get(f"{jobs.checkpoints}/{key}")
    assert stored is not None
    jobs.store.put(f"{jobs.checkpoints}/{key}", stored.data[:-1] + b"?")
    code, found = answer(capsys, verify=True)
    assert (code, [one["step"] for one in found["verified"] if not one["whole"]]) == (15, [30])
    assert found["verified"][1]["damaged"] == [{"object": key, "part": 1, "what": "is not as it was written"}]


@pytest.mark.parametrize("action", ["GetObject", "ListObjectsV2"])
def test_a_right_that_is_missing_is_said_with_what_to_allow(lab: Lab, jobs: JobStore, action: str) -> None:
    assert jobs.store.list("")
    lab.faults.add(action=action, code="AccessDenied", status=403, times=999)
    with pytest.raises(StoreError, match="AccessDenied") as raised:
        checkpoints("made", Asked(verify=True), as_json=False)
    assert raised.value.hint == "let this identity get, put, list and delete objects below the store's prefix"
