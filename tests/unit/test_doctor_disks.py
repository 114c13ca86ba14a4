"""What `doctor` says of this machine's disks, by the rule by which `train` is refused."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from gpucloud.adapters.home import Home, has_room
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.usecases.machines import disk_check
from gpucloud.wiring.found import _disks
from gpucloud.wiring.root import Gpucloud
from tests.unit.worlds import job

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


class Full:
    """Disks of which one is full: by folder, how much is free there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
        self.free, usage = free, namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free.get(Path(path).name, 9 * GIB)))


@pytest.mark.parametrize(
    ("full", "says"),
    [
        ("temporary", "temporary, temporary files: 3 MiB free"),
        ("store", "store/of/mine, the job's store: 3 MiB free"),
        ("other", None),
    ],
)
def test_train_asks_for_room_where_it_writes(
    full: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("temporary", "store", "other", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    Full(monkeypatch, **{full: 3 * MIB})
    asked = job(store=str(tmp_path / "store" / "of" / "mine"), cloud=Cloud.LOCAL)
    if says is None:
        Gpucloud(Home(tmp_path / "home")).require_room(asked)
    else:
        with pytest.raises(StoreError) as refused:
            Gpucloud(Home(tmp_path / "home")).require_room(asked)
        assert str(refused.value) == f"{tmp_path}/{says}"


def test_a_full_disk_of_a_known_store_is_a_warning_and_of_temporary_files_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("temporary", "store", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    stat = os.stat_result
    devices = {"home": 1, "temporary": 2, "store": 3}
    at = Path.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **how: (
            stat((*at(path, **how)[:2], devices[path.name], *at(path, **how)[3:]))
            if path.name in devices
            else at(path, **how)
        ),
    )
    Full(monkeypatch, temporary=3 * MIB, store=3 * MIB)
    gpucloud = Gpucloud(Home(tmp_path / "home"))
    url = (tmp_path / "store").as_uri()
    gpucloud.home.remember(KnownJob(name="moons", store=url, file=tmp_path / "a.yaml", cloud=Cloud.LOCAL))
    told = [(one.ok, one.bars, one.text.rpartition("/")[2]) for one in _disks(gpucloud, tmp_path / "home")]
    assert told == [
        (True, False, "home, gpucloud's folder"),
        (False, True, "temporary, temporary files: too little for any job"),
        (None, False, "store, a store: too little for its jobs"),
    ]
