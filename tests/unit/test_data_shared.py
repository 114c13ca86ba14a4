"""Files that two sets on one disk have in common."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpucloud.agent.data.staging import Order, Place, finish, prepare
from gpucloud.domain.job.data import DataFile, DataSet, data_set

SAME = DataFile(path="labels/1.txt", size=0, etag="d41d8cd98f00b204e9800998ecf8427e", key="k/1")
CHANGED = DataFile(path="names", size=1, etag="0cc175b9c0f1b6a831c399e269772661", key="k/names")


@pytest.fixture(autouse=True)
def _one_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCLOUD_DATA_ROOT", str(tmp_path / "disk"))


def order(found: DataSet) -> Order:
    return Order(key=found.content, content=found.content, target="/data", below_root=True)


def begun(root: Path, *files: DataFile) -> Place:
    found = data_set("s3://b/k", files)
    return prepare(root, order(found), found)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A node with a whole set of one file."""
    root, found = tmp_path / "node", data_set("s3://b/k", [SAME])
    folder = begun(root, SAME).folder
    (folder / "labels").mkdir()
    (folder / SAME.path).touch()
    os.utime(folder / SAME.path, (SAME.stamp_s, SAME.stamp_s))
    finish(root, order(found), found, folder)
    return root


def test_a_file_that_another_set_has_is_not_fetched_again(first: Path) -> None:
    assert begun(first, SAME, CHANGED).missing == (CHANGED,)


@pytest.mark.parametrize("why", [errno.EMLINK, errno.EPERM, errno.EXDEV])
def test_a_file_that_cannot_be_linked_is_fetched(first: Path, monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "link", refuse)
    assert begun(first, SAME, CHANGED).missing == (SAME, CHANGED)
