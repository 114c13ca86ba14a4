"""The user's folder is the user's only: what lies there is obeyed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.adapters.home import Home, SightingsFile, open_home
from gpucloud.adapters.terraform.program import require_terraform
from gpucloud.adapters.transfer.copying import program_argv, request
from gpucloud.adapters.transfer.localfiles import HashCache, read_tree
from gpucloud.cli.faults import known_error
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.job.spec import KnownJob
from gpucloud.domain.state.order import OrderMark
from gpucloud.domain.supervision.strays import Owner
from gpucloud.system.wholefile import write_whole

OTHER = 12345
NOW = datetime.fromisoformat("2026-03-01T12:00Z")


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "above" / "home"
    monkeypatch.setenv("GPUCLOUD_HOME", str(folder))
    (tmp_path / "above").mkdir()
    return folder


def test_a_home_is_made_for_its_owner_only(home):
    open_home()

    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_home_within_a_code_folder_is_not_sent_to_machines(tmp_path, monkeypatch):
    """Its keys sign orders and open machines: a machine is not its owner."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "code" / "own"))
    (tmp_path / "code").mkdir(mode=0o755)
    (tmp_path / "code" / "train.py").touch()
    open_home().remember(KnownJob(name="digits", store="file:///x", file=tmp_path / "job.yaml"))
    tree = read_tree(tmp_path / "code", HashCache(None, tmp_path / "code"))
    assert [entry.path for entry in tree.entries if entry.sha256 is not None] == ["train.py"]


def test_a_folder_that_holds_code_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").touch()
    open_home()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_home_that_others_may_read_at_most_is_taken(home, mode):
    home.mkdir()
    home.chmod(mode)

    assert open_home().root == home


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_home_that_others_may_write_to_is_refused_in_one_line(home, mode):
    home.mkdir()
    home.chmod(mode)

    with pytest.raises(UsageError) as caught:
        open_home()

    assert caught.value.message == f"others may write to {home}, and what lies there is obeyed"
    assert caught.value.hint == f"chmod go-w {home}"


def test_a_home_that_another_group_may_write_to_is_refused(home):
    home.mkdir()
    _give(home, -1, OTHER)
    home.chmod(0o770)

    with pytest.raises(UsageError, match="others may write"):
        open_home()


def test_a_home_of_somebody_else_is_refused(home):
    home.mkdir()
    _give(home, OTHER, -1)

    with pytest.raises(UsageError, match="another user"):
        open_home()


def test_a_folder_above_that_others_may_write_to_is_refused_unless_it_is_sticky(home):
    home.parent.chmod(0o777)
    with pytest.raises(UsageError, match=str(home.parent)):
        open_home()

    home.parent.chmod(0o1777)
    assert open_home().root == home


def test_a_link_to_an_open_folder_is_refused(home):
    (home.parent / "open").mkdir()
    (home.parent / "open").chmod(0o777)
    home.symlink_to(home.parent / "open")

    with pytest.raises(UsageError, match="others may write"):
        open_home()


@pytest.mark.parametrize("beyond", ["", "/inner"])
def test_a_link_that_others_may_move_is_refused_wherever_it_stands_on_the_way(home, monkeypatch, beyond):
    (home.parent / "real" / "inner").mkdir(parents=True)
    (home.parent / "shared").mkdir()
    (home.parent / "shared").chmod(0o777)
    (home.parent / "shared" / "link").symlink_to("../real")
    home.symlink_to(home.parent / "shared" / "link")
    for way in (home.parent / "shared" / "link", home):
        monkeypatch.setenv("GPUCLOUD_HOME", f"{way}{beyond}")
        with pytest.raises(UsageError, match=f"others may write to {home.parent / 'shared'},"):
            open_home()

    (home.parent / "shared").chmod(0o1777)
    assert open_home().root == Path(f"{home.parent}/real{beyond}")


def test_a_link_of_somebody_else_is_refused_where_others_may_make_links(home):
    (home.parent / "real").mkdir()
    home.parent.chmod(0o1777)
    home.symlink_to("real")
    assert open_home().root == home.parent / "real"
    if os.geteuid() != 0:
        pytest.skip("needs another user's files")
    os.chown(home, OTHER, -1, follow_symlinks=False)

    with pytest.raises(UsageError, match=f"{home} belongs to another user"):
        open_home()


def test_a_home_stays_where_it_was_looked_at_wherever_a_link_leads_by_and_by(home):
    for name in ("real", "other"):
        (home.parent / name).mkdir()
    home.symlink_to("real")
    opened = open_home()
    home.unlink()
    home.symlink_to("other")

    opened.remember(KnownJob(name="digits", store="file:///x", file=home / "job.yaml"))

    assert list((home.parent / "other").iterdir()) == []
    assert opened.root == home.parent / "real"


def test_what_a_command_writes_is_its_owners_whatever_the_umask_is(home):
    script = "import os, sys; os.umask(0); from gpucloud.__main__ import main; main()"
    env = {**os.environ, "GPUCLOUD_HOME": str(home)}

    subprocess.run([sys.executable, "-c", script, "keys"], env=env, check=True, capture_output=True)
    answer = subprocess.run([sys.executable, "-c", script, "init"], env=env, check=True, capture_output=True, cwd=home)

    made = list(home.rglob("*"))
    assert answer.stdout
    assert len(made) >= 3
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def test_the_agents_folder_on_a_node_is_its_users_only_around_trees_that_are_alike_everywhere(tmp_path):
    root = tmp_path / ".gpucloud"
    root.mkdir(mode=0o755)
    asked = request(str(root / "code"), "", "tree", name="0" * 64, most_bytes=None)

    subprocess.run(program_argv(sys.executable), input=asked, check=True, capture_output=True)

    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "code").stat().st_mode) == 0o755


def _give(folder, user, group):
    if os.geteuid() != 0:
        pytest.skip("needs another user's files")
    os.chown(folder, user, group)


def test_what_processes_and_threads_write_at_once_is_one_of_what_they_wrote(tmp_path):
    path = tmp_path / "file"
    contents = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for lasting in (False, True):
            list(pool.map(lambda text, lasting=lasting: write_whole(path, text, lasting=lasting), contents * 4))
            assert path.read_text() in contents
    assert (list(tmp_path.iterdir()), path.stat().st_mode & 0o777) == ([path], 0o600)


def test_a_full_disk_is_found_before_anything_is_rented_and_leaves_room_to_end_a_job(tmp_path, monkeypatch):
    home = Home(tmp_path)
    usage = SimpleNamespace(free=2**30)
    monkeypatch.setattr("gpucloud.adapters.home.shutil.disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"1 GiB free, 1 GiB is the least that works") as refused:
        home.require_room(2**30)
    assert refused.value.hint == "free some space there, or have GPUCLOUD_HOME name another folder"

    usage.free += 4 * 2**20
    home.require_room(2**30)
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 4 * 2**20
    home.give_reserve()  # there is room
    assert (tmp_path / "reserve").is_file()
    usage.free = 0
    home.give_reserve()
    assert (tmp_path / "reserve").stat().st_blocks == 0
    home.give_reserve()


def test_a_mark_takes_a_part_of_the_room_that_was_set_aside_and_only_where_the_disk_is_full(tmp_path, monkeypatch):
    """It is kept by `status`, too: a later `down` on the same full disk had none left."""
    home, free = Home(tmp_path), [2**30]
    home.require_room(0)
    reserve = tmp_path / "reserve"
    whole = reserve.stat().st_size
    monkeypatch.setattr("gpucloud.adapters.home.shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    for free[0], left in ((whole // 2, whole), (0, 3 * whole // 4), (whole // 4, 3 * whole // 4), (0, 3 * whole // 4)):
        home.order_marks.raise_to("file:///s", "job", OrderMark(first_at=NOW, number=1))
        assert reserve.stat().st_size == left

    free[0] = 2**30
    home.require_room(0)
    assert (reserve.stat().st_size, reserve.stat().st_blocks * 512 >= whole) == (whole, True)


def test_a_home_that_is_not_there_or_may_not_be_written_to_gives_no_reserve_and_ends_nothing(tmp_path, monkeypatch):
    gone = Home(tmp_path / "none" / "home")
    gone.give_reserve()
    assert not gone.root.exists()
    gone.require_room(0)
    assert (gone.root / "reserve").is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*/file/home/reserve: Not a directory"):
        Home(tmp_path / "file" / "home").require_room(0)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("gpucloud.adapters.home.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    monkeypatch.setattr("os.truncate", read_only)
    gone.give_reserve()
    assert (gone.root / "reserve").stat().st_size


def test_a_file_that_was_open_when_the_disk_became_full_is_no_fault_of_ours():
    known = known_error(OSError(errno.ENOSPC, "No space left on device"))
    assert (known.exit_code, known.message) == (15, "a file could not be written: No space left on device")
    assert known.hint == "free some space: `df -h` says which disk is full; `gpucloud down JOB` works on a full one"
    assert known_error(OSError(errno.EPERM, "Operation not permitted")).exit_code == 1


def test_terraforms_version_need_not_be_remembered(tmp_path):
    program = tmp_path / "terraform"
    program.write_text('#!/bin/sh\necho \'{"terraform_version": "1.11.4"}\'\n')
    program.chmod(0o755)
    (tmp_path / "file").write_text("")
    env = {"PATH": str(tmp_path) + os.pathsep + os.environ["PATH"]}
    for cache in (tmp_path / "file" / "terraform.json", tmp_path / "new" / "terraform.json"):
        assert require_terraform(env, cache) == program
    assert (tmp_path / "new" / "terraform.json").read_text().endswith(" 1.11.4")


def test_sightings_that_cannot_be_written_say_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    sightings = SightingsFile(tmp_path / "file" / "sightings.json")
    with pytest.raises(StoreError) as refused:
        sightings.save(Owner(account="1", store="s3://jobs"), {})
    assert refused.value.hint == "have GPUCLOUD_HOME name another folder"
