"""Which of a machine's disks may hold data sets: those where nobody else can put or exchange what a job trains on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpucloud.agent.data import staging as module
from gpucloud.agent.data.staging import FOLDER, disks
from gpucloud.domain.errors import NodeError


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's disk for work, as such disks are: everybody may write there, and remove what is his own."""
    monkeypatch.delenv("GPUCLOUD_DATA_ROOT", raising=False)
    point = tmp_path / "scratch"
    point.mkdir()
    point.chmod(0o1777)
    monkeypatch.setattr(module, "_mounted", lambda: iter([(point, False)]))
    return point


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is asked of sudo, which refuses."""
    asked: list[tuple[str, ...]] = []

    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(tuple(argv))
        return subprocess.CompletedProcess(argv, 1)

    monkeypatch.setattr(module.subprocess, "run", run)
    return asked


def folders(tmp_path: Path) -> list[str]:
    root = tmp_path / "home" / ".gpucloud"
    return [one.folder for one in disks(root, below_root=False) if one.folder != str(root / "data" / "sets")]


def test_a_shared_disk_gets_a_folder_of_our_own(scratch: Path, tmp_path: Path):
    assert folders(tmp_path) == [str(scratch / FOLDER)]
    assert folders(tmp_path) == [str(scratch / FOLDER)]
    status = (scratch / FOLDER).stat()
    assert (status.st_uid, status.st_mode & 0o022) == (os.getuid(), 0)


def test_a_folder_that_somebody_else_made_is_neither_used_nor_taken_from_him(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sudo: list[tuple[str, ...]]
):
    (scratch / FOLDER).mkdir()
    (scratch / FOLDER).chmod(0o755)
    mine = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: mine + 1)
    monkeypatch.setattr(module, "_keeps_names", lambda _: True)
    assert folders(tmp_path) == []
    assert sudo == []


def linked(folder: Path) -> None:
    (folder.parent / "theirs").mkdir()
    folder.symlink_to("theirs")


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def open_to_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("made", [linked, open_to_all, open_to_a_group, a_file])
def test_where_others_could_put_what_a_job_trains_on_no_set_lies(
    scratch: Path, tmp_path: Path, made: Callable[[Path], None], sudo: list[tuple[str, ...]]
):
    made(scratch / FOLDER)
    assert folders(tmp_path) == []
    assert sudo == []


def open_above(folder: Path) -> None:
    folder.parent.chmod(0o777)


@pytest.mark.parametrize("made", [linked, open_to_all, open_to_a_group, a_file, open_above])
def test_a_folder_that_is_named_and_that_others_may_fill_is_refused_with_what_helps(
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[Path], None],
    sudo: list[tuple[str, ...]],
):
    monkeypatch.setenv("GPUCLOUD_DATA_ROOT", str(scratch))
    made(scratch / FOLDER)
    with pytest.raises(NodeError, match="others may put or exchange") as refused:
        disks(tmp_path, below_root=False)
    own = "or have GPUCLOUD_DATA_ROOT name a folder of your own"
    assert refused.value.hint == f"chmod go-w {scratch} {scratch / FOLDER}, {own}"
    assert sudo == []


def test_a_folder_that_is_named_is_made_and_the_only_one(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GPUCLOUD_DATA_ROOT", str(scratch / "mine"))
    before = os.umask(0o002)  # as where each user has a group of his own
    try:
        assert [one.folder for one in disks(tmp_path, below_root=False)] == [str(scratch / "mine" / FOLDER)]
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_disk_on_which_others_could_exchange_our_folder_is_passed_over(scratch: Path, tmp_path: Path, mode: int):
    scratch.chmod(mode)
    assert folders(tmp_path) == []
    assert not (scratch / FOLDER).exists()


def test_the_disk_of_a_rented_machine_is_used_however_open_its_image_left_it(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scratch.chmod(0o777)
    monkeypatch.setattr(module, "_mounted", lambda: iter([(scratch, True)]))
    assert folders(tmp_path) == [str(scratch / FOLDER)]


def test_on_a_rented_machines_disk_root_makes_the_folder_and_never_changes_one_that_is_there(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sudo: list[tuple[str, ...]]
):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    scratch.chmod(0o755)
    monkeypatch.setattr(module.Path, "mkdir", refuse)
    assert not module._is_ours(scratch, rented=False)
    assert sudo == []  # a user's own host reports it to its administrator
    assert not module._is_ours(scratch, rented=True)
    assert [words[:4] for words in sudo] == [("sudo", "-n", "mkdir", "-m")]  # which fails where something is
