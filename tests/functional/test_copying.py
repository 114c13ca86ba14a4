"""Copies to and from a node that is this machine with another home; every byte goes through the node's own program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from gpucloud.adapters.copying import CODE, Copier
from gpucloud.adapters.localfiles import local_tree, sent
from gpucloud.adapters.outputs import OutputsFolder
from gpucloud.domain.errors import HostUnreachable, RemoteCommandFailed, StoreError
from tests.fakes.nodes import node_at
from tests.fakes.shell import FakeShell

PIECE = 16 << 20


class Cut:
    """Breaks the connection instead of the n-th request that reads or writes."""

    def __init__(self, host, at):
        self.node, self._host, self.left = host.node, host, at

    def run(self, argv, *, stdin=b"", timeout_s=30.0):
        if json.loads(stdin.partition(b"\n")[0])["op"] in ("read", "write"):
            self.left -= 1
            if self.left < 0:
                raise HostUnreachable("cut")
        return self._host.run(argv, stdin=stdin, timeout_s=timeout_s)


@pytest.fixture
def host(tmp_path):
    return FakeShell(tmp_path / "homes").host(node_at(22, None))


@pytest.fixture
def there(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def copier(host, base):
    return Copier(host, str(base), python=sys.executable)


def test_a_fetch_that_was_cut_off_goes_on_where_it_was(host, there, tmp_path):
    data = os.urandom(3 * PIECE + 5)
    (there / "big").write_bytes(data)
    (file,) = copier(host, there).listing(["big"]).files
    with pytest.raises(HostUnreachable):
        copier(Cut(host, 2), there).fetch([(file, tmp_path / "here")], root=tmp_path)
    assert not (tmp_path / "here").exists()
    assert copier(host, there).fetch([(file, tmp_path / "here")], root=tmp_path) == PIECE + 5
    assert (tmp_path / "here").read_bytes() == data
    assert copier(host, there).fetch([(file, tmp_path / "here")], root=tmp_path) == 0


def test_a_sending_that_was_cut_off_goes_on_where_it_was(host, there, tmp_path):
    (tmp_path / "big").write_bytes(data := os.urandom(3 * PIECE + 5))
    files = (sent(tmp_path / "big", "deep/big"),)
    with pytest.raises(HostUnreachable):
        copier(Cut(host, 2), there).send(files)
    assert not (there / "deep" / "big").exists()
    assert copier(host, there).send(files) == PIECE + 5
    assert (there / "deep" / "big").read_bytes() == data
    assert copier(host, there).send(files) == 0


def test_a_part_that_was_damaged_meanwhile_is_fetched_again(host, there, tmp_path):
    (there / "big").write_bytes(data := os.urandom(2 * PIECE))
    (file,) = copier(host, there).listing(["big"]).files
    with pytest.raises(HostUnreachable):
        copier(Cut(host, 1), there).fetch([(file, tmp_path / "here")], root=tmp_path)
    (part,) = tmp_path.glob(".here.*.part")
    with part.open("r+b") as opened:
        opened.write(b"damage")
    assert copier(host, there).fetch([(file, tmp_path / "here")], root=tmp_path) == PIECE + 2 * PIECE
    assert (tmp_path / "here").read_bytes() == data


def test_a_file_that_never_holds_still_is_refused(host, there, tmp_path):
    (there / "log").write_bytes(b"0")
    (file,) = copier(host, there).listing(["log"]).files

    class Written(Cut):
        def run(self, argv, *, stdin=b"", timeout_s=30.0):
            if b'"op": "read"' in stdin:
                (there / "log").write_bytes(os.urandom(8))
            return self._host.run(argv, stdin=stdin, timeout_s=timeout_s)

    with pytest.raises(RemoteCommandFailed, match="log changes while it is copied"):
        copier(Written(host, 0), there).fetch([(file, tmp_path / "here")], root=tmp_path)
    assert not (tmp_path / "here").exists()


def test_a_tree_arrives_with_empty_files_modes_times_and_links(host, there, tmp_path):
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "empty").touch()
    (tree / "a" / "run.sh").write_text("#!/bin/sh")
    (tree / "a" / "run.sh").chmod(0o755)
    os.utime(tree / "a" / "run.sh", ns=(1, 10**18))
    (tree / "link").symlink_to("a/run.sh")
    copier(host, there).send(*local_tree(tree, "got"))
    status = (there / "got" / "a" / "run.sh").stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o755, 10**18)
    assert (there / "got" / "a" / "empty").read_bytes() == b""
    assert (there / "got" / "link").readlink() == Path("a/run.sh")


def test_the_nearest_name_is_told_for_one_that_is_not_there(host, there):
    (there / "results").mkdir()
    (there / "results" / "model.pt").touch()
    found = copier(host, there).listing(["results/modle.pt", "resluts/model.pt", "nothing-like-it"])
    assert found.missing == (
        ("results/modle.pt", "results/model.pt"), ("resluts/model.pt", "results"), ("nothing-like-it", None),
    )  # fmt: skip


def test_the_code_folder_is_the_one_of_the_attempt_else_the_newest(host, tmp_path):
    agent = tmp_path / "homes" / host.node.id / ".gpucloud"
    for name, age in (("0a", 1), ("0b", 2)):
        (agent / "code" / name).mkdir(parents=True)
        os.utime(agent / "code" / name, (age, age))
    assert copier(host, CODE).listing([]).base == str(agent / "code" / "0b")
    (agent / "agent").mkdir()
    launch = {"launch": {"directory": str(agent / "code" / "0a")}}
    (agent / "agent" / "desired.json").write_text(json.dumps(launch))
    assert copier(host, CODE).listing([]).base == str(agent / "code" / "0a")


def test_outputs_are_never_written_through_a_link_that_lies_here(host, there, tmp_path):
    (there / "results").mkdir()
    (there / "results" / "x").write_text("x")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "outputs" / "results").symlink_to(tmp_path / "elsewhere")
    home = OutputsFolder(("results/",), tmp_path / "outputs", python=sys.executable)
    with pytest.raises(StoreError, match="results is a link"):
        home.bring_home(host, str(there))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_outputs_that_match_nothing_bring_nothing(host, there, tmp_path):
    assert OutputsFolder(("*.pt", "none/"), tmp_path / "o", python=sys.executable).bring_home(host, str(there)) == ()
