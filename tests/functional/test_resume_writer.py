"""The process that writes a rank's checkpoints: what it does for itself never keeps a save waiting."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucloud.domain.checkpoint.manifest import Commit
from gpucloud.resume.save.writer import Answer, Writer
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from tests.standins import in_writers

PREFIX = "jobs/x/checkpoints"
OLD = 100
SLOW = """
import time
from gpucloud.store.directory import DirectoryStore

def delete(self, key, real=DirectoryStore.delete):
    time.sleep(0.05)
    real(self, key)

DirectoryStore.delete = delete
"""


@contextlib.contextmanager
def memory(data: bytes) -> Iterator[int]:
    """Memory with a rank's object, as the rank shares it with its writer."""
    descriptor = os.memfd_create("object")
    try:
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


def heard(writer: Writer) -> Answer:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (answer := writer.answer(0.1)) is not None:
            return answer
    raise TimeoutError


def save(step: int, size: int) -> Answer:
    alone = {"level": "exact", "reason": "", "why": "due", "base": None, "epoch": None, "values": {}}
    return {"save": {"commit": [1, step], "name": "rank-00000", "size": size, "summed": 0, "alone": alone}}


def test_a_save_waits_for_a_moment_of_deleting_alone_and_the_rest_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    checkpoints = Checkpoints(open_store(str(store)), PREFIX, keep=2)
    checkpoints.announce(1)
    checkpoints.begin(base=None, attempt=1)
    for rank in range(OLD):  # of a save that was never committed
        checkpoints.upload(Commit(1, 1), f"rank-{rank:05d}", memoryview(b"old"))
    old = store / PREFIX / "data" / "000001" / "000000001"
    assert len(os.listdir(old)) == OLD

    header = json.dumps({"__metadata__": {"own": "{}", "shared": "{}"}}).encode()
    data = len(header).to_bytes(8, "little") + header
    monkeypatch.setenv("PYTHONPATH", in_writers.place(tmp_path / "first", SLOW))
    with memory(data) as descriptor:
        writer = Writer(str(store), PREFIX, 2, descriptor)
        writer.tell(save(2, len(data)))
        writer.tell(save(3, len(data)))
        answers = [heard(writer) for _ in range(4)]
        left = len(os.listdir(old))
        writer.close()
    assert [next(iter(answer)) for answer in answers] == ["saved", "committed"] * 2
    assert OLD / 2 < left < OLD
    assert not old.exists() or not os.listdir(old)
