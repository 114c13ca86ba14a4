"""Code sync when it is killed, when the folder changes meanwhile, and when the folder cannot be sent."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucloud.adapters.transfer import localfiles, node_trees
from gpucloud.adapters.transfer.copying import program_argv, request
from gpucloud.adapters.transfer.localfiles import HashCache, read_tree
from gpucloud.domain.errors import RemoteCommandFailed, UsageError
from gpucloud.ports import Completed
from tests.fakes.nodes import node_at
from tests.fakes.shell import FakeHost, FakeShell

NODE = node_at(22, None)

KILLED_BEFORE_STEP = """
import os, sys
left = [{step}]
def count(event, arguments):
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.utime", "os.symlink"):
        left[0] -= 1
        if left[0] == 0:
            os._exit(99)
sys.addaudithook(count)
"""


class KillableHost(FakeHost):
    """Ends the node's program right before its n-th step on the file system, as SIGKILL would."""

    step = 0

    def _execute(self, argv: tuple[str, ...], stdin: bytes, timeout_s: float) -> Completed:
        python, isolated, bare, option, program, *arguments = argv
        # `from __future__` must come first, so the program is handed to exec as a whole.
        program = KILLED_BEFORE_STEP.format(step=self.step) + f"exec(compile({program!r}, 'receiver', 'exec'))"
        return super()._execute((python, isolated, bare, option, program, *arguments), stdin, timeout_s)


def contents(tree: Path) -> dict[str, str]:
    return {str(p.relative_to(tree)): p.read_text() for p in sorted(tree.rglob("*")) if p.is_file()}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_killed_before_any_step_no_tree_is_torn_and_the_next_sync_repairs(tmp_path: Path):
    first = write(tmp_path / "first", {"same": "1", "sub/changed": "2"})
    second = write(tmp_path / "second", {"same": "1", "sub/changed": "3", "new": "4"})
    (second / "link").symlink_to("new")
    names = [read_tree(root, HashCache(None, root)).sha256 for root in (first, second)]
    whole = dict(zip(names, (contents(first), contents(second)), strict=True))
    FakeHost(FakeShell(tmp_path / "homes"), NODE).sync(first, "code")
    step, finished = 0, False
    while not finished:
        step += 1
        host = KillableHost(FakeShell(tmp_path / f"homes-{step}"), NODE)
        store = tmp_path / f"homes-{step}" / NODE.id / "code"
        shutil.copytree(tmp_path / "homes" / NODE.id / "code", store)
        host.step = step
        try:
            host.sync(second, "code")
            finished = True
        except RemoteCommandFailed:
            trees = [path for path in store.iterdir() if not path.name.startswith(".")]
            assert all(contents(tree) == whole[tree.name] for tree in trees), f"torn at step {step}"
        host.step = 0
        assert host.sync(second, "code") == f"code/{names[1]}"
        assert contents(store / names[1]) == whole[names[1]]
        assert sorted(path.name for path in store.iterdir()) == sorted([".incoming", ".lock", ".manifests", *names])
    assert step > 30


def test_damaged_old_tree_is_not_copied_from(tmp_path: Path):
    host = FakeHost(FakeShell(tmp_path / "homes"), NODE)
    code = write(tmp_path / "code", {"a": "right", "b": "1"})
    old = tmp_path / "homes" / NODE.id / host.sync(code, "code")
    status = (old / "a").stat()
    (old / "a").write_text("wrong")
    os.utime(old / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    write(code, {"b": "2"})
    assert contents(tmp_path / "homes" / NODE.id / host.sync(code, "code")) == {"a": "right", "b": "2"}


def test_the_tree_of_the_attempt_stays_however_often_the_folder_is_edited(tmp_path: Path):
    """Its ranks run there, and there their outputs lie."""
    host = FakeHost(FakeShell(tmp_path / "homes"), NODE)
    home = tmp_path / "homes" / NODE.id
    trees = []
    for edit in range(node_trees.KEPT_TREES + 3):
        trees.append(home / host.sync(write(tmp_path / "code", {"train.py": str(edit)}), "code"))
        if edit == 1:
            (home / "agent").mkdir()
            (home / "agent" / "desired.json").write_text(json.dumps({"launch": {"directory": str(trees[1])}}))
    assert [tree.exists() for tree in trees] == [False, True, False, *[True] * node_trees.KEPT_TREES]


class ChangingHost(FakeHost):
    """Something happens on the supervisor's side before each of the first commands."""

    happens: Callable[[], object] = staticmethod(lambda: None)
    times = 1

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        if self.times:
            self.times -= 1
            self.happens()
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)


@pytest.mark.parametrize("change", ["rewrite", "remove"])
def test_file_that_changes_while_it_is_sent_arrives_as_it_is_at_last(tmp_path: Path, change: str):
    code = write(tmp_path / "code", {"train.py": "before", "other": "x"})
    host = ChangingHost(FakeShell(tmp_path / "homes"), NODE)
    host.happens = lambda: (
        (code / "train.py").write_text("after!") if change == "rewrite" else (code / "train.py").unlink()
    )
    path = host.sync(code, "code")
    assert contents(tmp_path / "homes" / NODE.id / path) == contents(code)


def test_file_that_never_rests_is_named(tmp_path: Path):
    code = write(tmp_path / "code", {"train.log": "0"})
    host = ChangingHost(FakeShell(tmp_path / "homes"), NODE)
    host.times = 1_000
    host.happens = lambda: (code / "train.log").write_text(str(time.monotonic_ns()))
    with pytest.raises(UsageError, match=r"train\.log"):
        host.sync(code, "code")


def test_node_without_room_or_python_is_named(tmp_path: Path):
    code = write(tmp_path / "code", {"a": "1"})
    answers = [
        Completed(exit_code=1, stdout=b"", stderr=b"Traceback\n/home: No space left on device\n"),
        Completed(exit_code=127, stdout=b"", stderr=b"python3: not found\n"),
        Completed(exit_code=0, stdout=b"Welcome!\n", stderr=b""),
    ]
    for answer, why in zip(answers, ["No space left", "not found", "no answer"], strict=True):
        shell = FakeShell(tmp_path / "homes", lambda *_, answer=answer: answer)
        with pytest.raises(RemoteCommandFailed, match=why):
            shell.host(NODE).sync(code, "code")


def test_damage_on_the_way_is_refused(tmp_path: Path):
    shell = FakeShell(tmp_path / "homes")
    head = request("code", "", "tree", name="f" * 64, most_bytes=None)
    given = head + b'[0, [["' + b"0" * 64 + b'", 4]]]\nabcd'
    damaged = shell.host(NODE).run(program_argv("python3"), stdin=given)
    cut_off = shell.host(NODE).run(program_argv("python3"), stdin=given[:-1])
    assert (damaged.exit_code, cut_off.exit_code) == (1, 1)
    assert b"damaged" in damaged.stderr
    assert b"cut off" in cut_off.stderr
    assert not (tmp_path / "homes" / NODE.id / "code" / ".incoming" / ("0" * 64)).exists()


def test_path_that_leaves_the_tree_is_refused_on_the_node_too(tmp_path: Path):
    with pytest.raises(SystemExit, match="leaves the tree"):
        node_trees._parsed(json.dumps([["../x", 0, 0, 0o100644, "0" * 64]]).encode(), "0" * 64)


def test_empty_folder_is_a_tree(tmp_path: Path):
    (tmp_path / "code").mkdir()
    host = FakeHost(FakeShell(tmp_path / "homes"), NODE)
    assert (tmp_path / "homes" / NODE.id / host.sync(tmp_path / "code", "code")).is_dir()


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "sub/../../outside", "via/outside"])
def test_link_that_leaves_the_folder_is_named(tmp_path: Path, target: str):
    write(tmp_path, {"outside": "secret", "code/sub/file": ""})
    (tmp_path / "code" / "via").symlink_to(tmp_path) if target.startswith("via") else None
    (tmp_path / "code" / "leak").symlink_to(target)
    with pytest.raises(UsageError, match=r"link (leak|via) -> .* leaves") as caught:
        read_tree(tmp_path / "code", HashCache(None, tmp_path))
    assert ".gpucloudignore" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("target", "arrives"),
    [
        ("{root}/sub/file", "sub/file"),
        ("../code/sub/file", "sub/file"),
        ("none", "none"),
        ("sub/../sub/file", "sub/file"),
        ("./sub//file", "sub/file"),
    ],
)
def test_link_inside_the_folder_is_relative_on_the_node(tmp_path: Path, target: str, arrives: str):
    code = write(tmp_path / "code", {"sub/file": "x"})
    (code / "link").symlink_to(target.format(root=code))
    host = FakeHost(FakeShell(tmp_path / "homes"), NODE)
    tree = tmp_path / "homes" / NODE.id / host.sync(code, "code")
    assert (tree / "link").readlink() == Path(arrives)


def test_special_and_huge_files_are_named_unless_ignored(tmp_path: Path):
    code = write(tmp_path / "code", {"a": ""})
    os.mkfifo(code / "pipe")
    with pytest.raises(UsageError, match="pipe is a socket, pipe or device"):
        read_tree(code, HashCache(None, code))
    write(code, {".gpucloudignore": "/pipe\n"})
    with (code / "huge").open("wb") as file:
        file.truncate(localfiles.LARGEST_FILE_BYTES + 1)
    with pytest.raises(UsageError, match=r"huge is 1\.0 GiB"):
        read_tree(code, HashCache(None, code))
    write(code, {".gpucloudignore": "/pipe\n/huge\n"})
    assert [entry.path for entry in read_tree(code, HashCache(None, code)).entries] == [".gpucloudignore", "a"]


def test_folder_that_is_none_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="not a folder"):
        read_tree(tmp_path / "none", HashCache(None, tmp_path / "none"))


def hash_of(code: Path, cache: Path) -> str | None:
    return read_tree(code, HashCache(cache, code)).entries[0].sha256


def test_hash_is_kept_only_when_the_file_is_not_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code, cache = write(tmp_path / "code", {"a": "1"}), tmp_path / "cache"
    right = hash_of(code, cache)
    assert not cache.exists()
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert hash_of(code, cache) == right
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace(str(right), "kept"))
    assert hash_of(code, cache) == "kept"


def test_file_of_the_same_size_and_time_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code, cache = write(tmp_path / "code", {"a": "1"}), tmp_path / "cache"
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)
    before = hash_of(code, cache)
    status = (code / "a").stat()
    (code / "a").write_text("2")
    os.utime(code / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_of(code, cache) != before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": [1]}'])
def test_damaged_cache_costs_only_time(tmp_path: Path, text: str):
    code, cache = write(tmp_path / "code", {"a": "1"}), tmp_path / "cache"
    cache.mkdir()
    store = HashCache(cache, code)._file
    assert store is not None
    store.write_text(text)
    assert hash_of(code, cache) == hash_of(code, tmp_path / "other")


def test_socket_file_in_an_ignored_folder_does_not_matter(tmp_path: Path):
    code = write(tmp_path / "code", {"a": "1", ".gitignore": "run/\n"})
    (code / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(code / "run" / "s"))
        assert len(read_tree(code, HashCache(None, code)).entries) == 2
