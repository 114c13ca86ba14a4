"""What only the directory store can get wrong."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpucloud.domain.errors import StoreError
from gpucloud.store import open_store
from gpucloud.store.parts import all_done

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def test_the_version_changes_with_every_write_even_of_the_same_bytes(store, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)  # a clock that stands still
    assert len({store.put("key", b"same") for _ in range(50)}) == 50


def test_a_crashed_writer_leaves_nothing_that_is_listed_or_read(store, tmp_path):
    code = (
        "import os, sys; from gpucloud.store import open_store; from gpucloud.store import directory\n"
        "directory._place = lambda *a, **k: os._exit(9)\n"
        f"open_store({str(tmp_path / 'store')!r}).put('a/key', b'half')\n"
    )
    store.put("a/other", b"x")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 9
    assert len(list((tmp_path / "store" / "a").iterdir())) == 2
    assert store.list("") == ("a/other",)
    assert store.get("a/key") is None


@pytest.mark.parametrize(
    ("number", "hint", "may_pass"),
    [
        (errno.ENOSPC, "free some space", False),
        (errno.EACCES, "writable", False),
        (errno.EIO, "healthy", True),  # as while the server of the folder is away
        (errno.ESTALE, "healthy", True),
    ],
)
def test_a_disk_that_does_not_write_is_explained_and_leaves_the_old_object(store, monkeypatch, number, hint, may_pass):
    store.put("key", b"old")

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match=os.strerror(number)) as raised:
            store.put("key", b"new")
    assert hint in raised.value.hint
    assert raised.value.may_pass is may_pass
    assert store.get("key").data == b"old"
    assert sorted(path.name for path in store.root.iterdir()) == [".gpucloud-locks", "gpucloud-store", "key"]


def test_a_folder_made_by_delete_and_put_at_once_is_there(store):
    for number in range(50):
        store.put("a/b/key", b"%d" % number)
        store.delete("a/b/key")
    assert list(store.root.rglob("key")) == []
    assert not (store.root / "a").exists()


def calls_of(store):
    """Return a call of each kind."""
    return (
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.delete("a"),
        lambda: store.put("b", b"2"),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
    )


def test_a_root_that_is_gone_is_away_and_is_not_made_anew(store, tmp_path):
    assert (store.get("a"), store.list("")) == (None, ())  # before anything was written
    store.put("a", b"1")
    store.get("a")
    moved = store.root.rename(tmp_path / "moved")
    for call in calls_of(store):
        with pytest.raises(StoreError, match="the store's folder, is not there any more") as away:
            call()
        assert away.value.may_pass
    assert not store.root.exists()
    moved.rename(store.root)
    assert store.get("a").data == b"1"


OTHER = "0" * 32


def _emptied(root):
    root.rename(root.with_name("moved"))
    root.mkdir()  # as a place where nothing is mounted


def _swapped(root):
    _emptied(root)
    (root / "gpucloud-store").write_text(f"{OTHER}\n")


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda root: root.rename(root.with_name("moved")), "is not there"),
        (_emptied, "has nothing of the store that it was"),
        (_swapped, "is another store than it was"),
    ],
)
@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_store_that_is_not_there_any_more_is_away_and_neither_empty_nor_written_to(
    store, happens, why, is_new_process
):
    store.put("a", b"1")
    seen = open_store(store.address) if is_new_process else store
    happens(store.root)
    before = sorted(store.root.rglob("*"))
    for call in calls_of(seen):
        with pytest.raises(StoreError, match=why) as away:
            call()
        assert away.value.may_pass
    assert sorted(store.root.rglob("*")) == before
    shutil.rmtree(store.root, ignore_errors=True)
    store.root.with_name("moved").rename(store.root)
    assert seen.get("a").data == b"1"
    assert seen.put("b", b"2")


def test_a_store_gets_one_identity_with_its_first_object_and_an_old_one_with_its_next(store):
    assert (store.identity, store.address) == (None, store.url)
    with ThreadPoolExecutor() as hands:
        list(hands.map(lambda number: open_store(store.url).put(f"{number}", b""), range(8)))
    first = store.identity
    assert first
    assert store.address == f"{store.url}#{first}"
    (store.root / "gpucloud-store").unlink()  # as before stores had one
    old = open_store(store.url)
    assert old.get("1").data == b""
    assert old.put("new", b"")
    assert old.identity not in (None, first)


def _copied_without_hidden_files(root):
    subprocess.run(f"mkdir {root}-new && cp -r {root}/* {root}-new/", shell=True, check=True)
    shutil.rmtree(root)
    root.with_name(f"{root.name}-new").rename(root)


def test_a_store_that_was_copied_without_its_hidden_files_is_that_store(store):
    store.put("jobs/a/state.json", b"1")
    address = store.address
    _copied_without_hidden_files(store.root)
    assert open_store(store.url).put("jobs/b/state.json", b"2")  # by one that knows no identity
    seen = open_store(address)
    assert seen.list("") == ("jobs/a/state.json", "jobs/b/state.json")
    assert seen.put("jobs/a/order.json", b"")
    assert seen.address == address


@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_store_that_lacks_its_marker_alone_is_the_store_and_gets_that_marker_again(store, *, is_new_process):
    store.put("jobs/a/state.json", b"1")
    address = store.address
    seen = open_store(address) if is_new_process else store
    (store.root / "gpucloud-store").rename(store.root / ".gpucloud-store")  # where it was before
    _copied_without_hidden_files(store.root)
    assert seen.list("jobs/a/") == ("jobs/a/state.json",)
    assert seen.get("jobs/a/none") is None
    with pytest.raises(StoreError, match="has nothing of the store that it was"):  # of `b` nothing is there
        open_store(address).get("jobs/b/state.json")
    assert seen.put("jobs/a/order.json", b"")
    assert open_store(store.url).address == address
    assert open_store(address).get("jobs/b/state.json") is None


def test_a_marker_where_it_was_before_is_read_and_put_where_it_is_copied_along(store):
    store.put("a", b"1")
    address = store.address
    (store.root / "gpucloud-store").rename(store.root / ".gpucloud-store")
    assert open_store(address).get("b") is None
    assert open_store(store.url).put("b", b"2")
    assert (store.root / "gpucloud-store").read_text() == (store.root / ".gpucloud-store").read_text()
    assert open_store(address).list("") == ("a", "b")


def test_a_store_that_may_not_be_given_an_identity_is_used_as_it_is(store, monkeypatch):
    store.put("a", b"1")
    (store.root / "gpucloud-store").unlink()
    monkeypatch.setattr("gpucloud.store.directory._MARKER", "no/such/folder")
    other = open_store(store.url)
    assert (other.list(""), other.address) == (("a",), store.url)
    assert other.put("b", b"2")
    assert sorted(path.name for path in store.root.iterdir()) == [".gpucloud-locks", "a", "b"]


HOLDS = """
import os, signal, sys
from gpucloud.store import directory
place = directory._place
def stop_in_the_middle(*words, **more):
    os.kill(os.getpid(), signal.SIGSTOP)
    return place(*words, **more)
directory._place = stop_in_the_middle
directory.DirectoryStore(directory.Path(sys.argv[1])).put("frozen", b"half")
"""


def test_a_writer_that_was_stopped_in_the_middle_is_waited_for_by_none_but_its_own_key(store, monkeypatch):
    stopped = subprocess.Popen([sys.executable, "-c", HOLDS, str(store.root)])
    try:
        os.waitpid(stopped.pid, os.WUNTRACED)
        store.put("other", b"whole")
        store.put("absent", b"whole", if_absent=True)
        store.put("frozen", b"whole", if_absent=True)
        monkeypatch.setattr("gpucloud.store.directory._LOCK_LIMIT_S", 0.05)
        with pytest.raises(StoreError, match="one that is stopped keeps it"):
            store.put("frozen", b"late")
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.wait(10)
    assert store.put("frozen", b"again")


def test_a_disk_that_is_full_in_the_middle_of_a_large_object_leaves_nothing_behind(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.put("key", b"before")
    written = []

    def pwrite(descriptor, data, at):
        written.append(at)
        if at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match="No space left") as raised:
        store.write("key", (memoryview(bytes(33 << 20)),))
    assert "free some space" in raised.value.hint
    assert written
    assert store.get("key").data == b"before"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["gpucloud-store", "key"]


def test_room_for_a_large_object_is_asked_for_before_it_is_written(tmp_path, monkeypatch):
    def no_room(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
    with pytest.raises(StoreError, match="No space left"):
        open_store(str(tmp_path)).write("key", (memoryview(bytes(33 << 20)),))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_sets_no_room_aside_is_written_all_the_same(tmp_path, monkeypatch, code):
    def unable(descriptor, start, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", unable)
    store = open_store(str(tmp_path))
    store.write("key", (memoryview(bytes(33 << 20)),))
    assert store.read_into("key", (33 << 20) - 1, memoryview(bytearray(1)))


def test_writes_and_reads_that_come_in_bits_are_whole_in_the_end(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:3], at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: preadv(descriptor, [views[0][:2]], at))
    store = open_store(str(tmp_path))
    store.write("key", (memoryview(b"01234"), memoryview(b"56789")))
    memory = bytearray(9)
    assert store.read_into("key", 1, memoryview(memory))
    assert memory == b"123456789"


def test_of_several_parts_the_first_failure_is_told_and_nothing_more_is_begun():
    begun = []

    def work(number):
        begun.append(number)
        if number == 0:
            raise ValueError("the first")
        time.sleep(0.01)

    with pytest.raises(ValueError, match="the first"):
        all_done(work, range(200))
    assert len(begun) < 100


LARGE = memoryview(bytes(33 << 20))


def test_a_writer_that_is_killed_leaves_nothing_of_a_large_object_on_the_disk(store, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from gpucloud.store import open_store\n"
        "os.pwrite = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "open_store(sys.argv[1]).write('folder/key', (memoryview(bytes(33 << 20)),))\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, store.url], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "store" / "folder").iterdir()) == []
    store.write("folder/key", (LARGE,))
    assert [path.name for path in (tmp_path / "store" / "folder").iterdir()] == ["key"]
    assert (tmp_path / "store" / "folder" / "key").stat().st_mode & 0o777 == 0o666 & ~umask()


def test_a_file_system_without_unnamed_files_is_written_by_a_name_beside(store, tmp_path, monkeypatch):
    real = os.open

    def without(path, flags, *more, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", without)
    store.write("folder/key", (LARGE,))
    assert store.get("folder/key").data == LARGE
    assert [path.name for path in (tmp_path / "store" / "folder").iterdir()] == ["key"]


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_named_as_what_it_is(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="has no hard links") as refused:
        open_store(str(tmp_path)).put("a", b"1", if_absent=True)
    assert "another file system" in refused.value.hint
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
