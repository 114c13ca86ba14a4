"""What `doctor` says of this machine's disks, by the rule by which `train` is refused."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from gpucloud.adapters.home import Home, has_room
from gpucloud.domain.errors import StoreError
from gpucloud.usecases.machines import disk_check

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("free", "ok", "bars", "says"),
    [
        (0, False, True, "0 B free at /h, a folder: too little for any job"),
        (3 * MIB, False, True, "3 MiB free at /h, a folder: too little for any job"),
        (4 * MIB, False, True, "4 MiB free at /h, a folder: too little for a job on this machine"),
        (GIB, False, True, "1 GiB free at /h, a folder: too little for a job on this machine"),
        (GIB + 4 * MIB, None, False, "1 GiB free at /h, a folder: little"),
        (5 * GIB, True, False, "5 GiB free at /h, a folder"),
    ],
)
def test_a_disk_is_judged_by_what_a_job_needs(free: int, ok: bool | None, bars: bool, says: str) -> None:
    told = disk_check("a folder", Path("/h"), free, has_room=has_room, least=GIB, usual=5 * GIB)
    assert (told.ok, told.bars, told.text) == (ok, bars, says)


@pytest.mark.parametrize(("free", "refused"), [(GIB + 4 * MIB - 1, True), (GIB + 4 * MIB, False)])
def test_train_is_refused_by_the_same_rule(
    free: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, free))
    home = Home(tmp_path)
    if refused:
        with pytest.raises(StoreError):
            home.require_room(GIB)
    else:
        home.require_room(GIB)
    assert disk_check("", tmp_path, free, has_room=has_room, least=GIB).bars is refused
