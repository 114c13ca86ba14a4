"""Copies to and from a node that is this machine with another home; every byte goes through the node's own program."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from gpucloud.adapters.transfer.copying import CODE, Copier, packed_program
from gpucloud.adapters.transfer.localfiles import HashCache, local_tree, read_tree, sent
from gpucloud.adapters.transfer.outputs import OutputsFolder
from gpucloud.adapters.transfer.sync import Sources
from gpucloud.cli.commands.reaching import _place
from gpucloud.domain.errors import HostUnreachable, LandingRefused, RemoteCommandFailed, StoreError, UsageError
from gpucloud.domain.job.data import wanted
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.untrusted import fitting
from tests.fakes.nodes import node_at
from tests.fakes.shell import FakeShell
from tests.standins.lying_node import EVIL, LyingHost

PIECE = 16 << 20


class Cut:
    """Breaks the connection instead of the n-th request that reads or writes."""

    def __init__(self, host, at):
        self.node, self._host, self.left = host.node, host, at

    def run(self, argv, *, stdin=b"", timeout_s=30.0):
        if json.loads(stdin.removeprefix(packed_program()).partition(b"\n")[0])["op"] in ("read", "write"):
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


def here(_top):
    return "here"


def text_of(link):
    return os.readlink(link)  # noqa: PTH115  a Path would tidy it


def staged(folder):
    return [path for staging in folder.glob(".gpucloud-landing-*") for path in staging.iterdir()]


def test_a_fetch_that_was_cut_off_goes_on_where_it_was(host, there, tmp_path):
    data = os.urandom(3 * PIECE + 5)
    (there / "big").write_bytes(data)
    found = copier(host, there).listing(["big"])
    with pytest.raises(HostUnreachable):
        copier(Cut(host, 2), there).fetch(found, tmp_path, here)
    assert not (tmp_path / "here").exists()
    assert copier(host, there).fetch(found, tmp_path, here) == (PIECE + 5, (), ())
    assert (tmp_path / "here").read_bytes() == data
    assert copier(host, there).fetch(found, tmp_path, here) == (0, (), ())
    assert staged(tmp_path) == []


def test_a_sending_that_was_cut_off_goes_on_where_it_was(host, there, tmp_path):
    (tmp_path / "big").write_bytes(data := os.urandom(3 * PIECE + 5))
    files = (sent(tmp_path / "big", "deep/big"),)
    with pytest.raises(HostUnreachable):
        copier(Cut(host, 2), there).send(files)
    assert not (there / "deep" / "big").exists()
    assert copier(host, there).send(files) == PIECE + 5
    assert (there / "deep" / "big").read_bytes() == data
    assert copier(host, there).send(files) == 0


def test_files_with_long_names_arrive_whatever_they_are_written_in_and_however_alike_they_begin(host, there, tmp_path):
    names = [f"{'shard-' * 36}{n}" for n in range(3)] + ["\N{CJK UNIFIED IDEOGRAPH-8CC7}" * 84]
    for name in names:
        (tmp_path / name).write_bytes(b"the same")
    copier(host, there).send([sent(tmp_path / name, name) for name in names])
    assert {path.name: path.read_bytes() for path in there.iterdir()} == dict.fromkeys(names, b"the same")


def test_a_part_that_was_damaged_meanwhile_is_fetched_again(host, there, tmp_path):
    (there / "big").write_bytes(data := os.urandom(2 * PIECE))
    found = copier(host, there).listing(["big"])
    with pytest.raises(HostUnreachable):
        copier(Cut(host, 1), there).fetch(found, tmp_path, here)
    (part,) = staged(tmp_path)
    with part.open("r+b") as opened:
        opened.write(b"damage")
    assert copier(host, there).fetch(found, tmp_path, here) == (PIECE + 2 * PIECE, (), ())
    assert (tmp_path / "here").read_bytes() == data


def test_a_file_that_never_holds_still_is_refused(host, there, tmp_path):
    (there / "log").write_bytes(b"0")
    found = copier(host, there).listing(["log"])

    class Written(Cut):
        def run(self, argv, *, stdin=b"", timeout_s=30.0):
            if b'"op": "read"' in stdin:
                # Another length each time: a file's time may stay the same for some milliseconds.
                (there / "log").write_bytes(os.urandom((there / "log").stat().st_size % 8 + 1))
            return self._host.run(argv, stdin=stdin, timeout_s=timeout_s)

    with pytest.raises(RemoteCommandFailed, match="log changes while it is copied"):
        copier(Written(host, 0), there).fetch(found, tmp_path, here)
    assert not (tmp_path / "here").exists()


def test_what_is_deleted_while_it_is_copied_is_named_and_the_rest_arrives(host, there, tmp_path):
    (folder := there / "logs").mkdir()
    for name in ("kept", "rotated"):
        (folder / name).write_text(name)
    found = copier(host, there).listing(["logs"])
    (folder / "rotated").unlink()
    moved, _, gone = copier(host, there).fetch(found, tmp_path, here)
    assert (moved, gone) == (4, ("logs/rotated",))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["kept"]


def test_an_output_that_is_deleted_while_it_is_brought_home_is_missing(host, there, tmp_path, monkeypatch):
    for name in ("best.pt", "last.pt"):
        (there / name).write_text(name)
    listing = Copier.listing

    def deleted(self, paths):
        found = listing(self, paths)
        (there / "last.pt").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Copier, "listing", deleted)
    outputs = OutputsFolder(target=tmp_path / "home", paths=("best.pt", "last.pt"), python=sys.executable, marks=False)
    brought = outputs.bring_home(host, str(there), 1)
    assert (brought.paths, brought.size) == ((str(tmp_path / "home/best.pt"),), 7)
    assert [(one.path, one.why) for one in brought.missing] == [("last.pt", "is not there")]


@pytest.mark.parametrize("now", [b"other", b"longer than it was", None])
def test_data_that_is_not_what_it_was_is_named_before_anything_is_sent(host, there, tmp_path, now):
    (source := tmp_path / "set").mkdir()
    (file := source / "a").write_bytes(b"there")
    sources = Sources(python=sys.executable)
    one = wanted(sources.listed(str(source)), "/data", Cloud.AWS)
    sources.send(host, one, str(there), ("a",))
    assert (there / "a").read_bytes() == b"there"
    (there / "a").unlink()
    file.unlink() if now is None else file.write_bytes(now)
    with pytest.raises(UsageError, match="set/a is not what it was when the job began") as refused:
        sources.send(host, one, str(there), ("a",))
    assert refused.value.hint == "put it back, or give the job another name"
    assert list(there.iterdir()) == []


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


def test_what_the_agent_notes_of_a_setup_in_the_code_folder_is_no_output_and_no_code(host, there):
    (there / ".gpucloud-setup").mkdir()
    (there / ".gpucloud-setup" / "0123").touch()
    (there / ".hidden").touch()
    for pattern in (".", "*", ".*", "**"):
        found = copier(host, there).listing([pattern])
        assert not any("gpucloud" in f"{one.top}/{one.inner}" for one in (*found.files, *found.folders))
    assert [entry.path for entry in read_tree(there, HashCache(None, there)).entries] == [".hidden"]


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
        home.bring_home(host, str(there), 1)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# A node that lies


def rows(top, *files, links=(), is_folder=False):
    """A listing of one thing that was asked for, by what the node says of it."""
    folders = [[0, "", 0o755]] if is_folder else []
    listed = [[0, name, len(EVIL), 0o644, 0] for name in files]
    return {
        "base": "/", "found": [[0, top]], "files": listed, "links": [[0, *link] for link in links], "folders": folders,
        "outside": [], "missing": [],
    }  # fmt: skip


@pytest.mark.parametrize("top", ["results/..", "..", "/root", ".", "results/../..", "result", "", "results/"])
def test_a_node_does_not_choose_the_name_of_the_folder_that_arrives(tmp_path, top):
    with pytest.raises(LandingRefused, match="and 'results' was asked for"):
        Copier(LyingHost(rows(top, ".bashrc", is_folder=True)), CODE).listing(["results"])


def test_a_folder_arrives_under_the_name_that_the_user_wrote(tmp_path):
    there = tmp_path / "proj"
    there.mkdir()
    for written, name in (("results", "results/x"), ("a/b/..", "x"), ("~", "x"), (".", "x"), ("~/out/", "out/x")):
        said = "/home/ubuntu" if written.startswith("~") else written.rstrip("/")
        lying = Copier(LyingHost(rows(said, "x", is_folder=True)), CODE)
        found = lying.listing([written])
        lying.fetch(found, *_place(found, written, there))
        assert (there / name).read_bytes() == EVIL
        (there / name).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["proj"]


@pytest.mark.parametrize(
    ("pattern", "said", "fits"),
    [
        ("*.pt", "a.pt", True),
        ("*.pt", ".bashrc", False),
        ("*.pt", "d/a.pt", False),
        ("*", ".bashrc", False),
        ("*", "..", False),
        ("d/*/x", "d/e/x", True),
        ("d/*/x", "e/e/x", False),
        ("**/x", "a/b/x", True),
        ("**/x", ".ssh/x", False),
        ("**/x", "x", True),
        ("d/**", "d/", True),
        ("d/**/**", "d/", True),
        ("d/*/**", "d/a", False),
        ("~/*.pt", "/home/me/a.pt", True),
        ("~/*.pt", "/home/me/.bashrc", False),
        ("/data/*", "data/x", False),
        ("./*", "./a", True),
        ("[ab]", "a", True),
        ("[ab]", "c", False),
        ("*", "a/" * 200 + "x", False),
        ("**", "a/" * 5000 + "x", False),
    ],
)
def test_only_what_a_pattern_finds_arrives(pattern, said, fits):
    lying = Copier(LyingHost(rows(said, "")), CODE)
    if fits:
        assert [file.top for file in lying.listing([pattern]).files] == [said]
    else:
        with pytest.raises(LandingRefused):
            lying.listing([pattern])


def test_the_part_of_a_file_is_not_written_through_a_link_that_came_before(tmp_path):
    """The link's text stays inside; what it goes up from is a link, which came in an earlier copy."""
    home, here = tmp_path, tmp_path / "proj"
    here.mkdir()
    (home / ".profile").write_text("mine\n")
    for links in ([("p/q/r/s", "../../../a")], [(".model.bin.0123456789abcdef.part", "p/q/r/s/../../../.profile")]):
        lying = Copier(LyingHost(rows("top", "model.bin", links=links, is_folder=True)), CODE)
        with contextlib.suppress(LandingRefused):
            lying.fetch(lying.listing(["top"]), here, lambda _: "")
    assert (home / ".profile").read_text() == "mine\n"
    assert not (here / ".model.bin.0123456789abcdef.part").is_symlink()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[" * 100_000,
        b"null",
        b"{}",
        b'{"base": 1}',
        json.dumps({**rows("top"), "files": [[7, "", 1, 1, 1]]}).encode(),
    ],
)
def test_an_answer_that_is_none_is_one_clear_error(said):
    with pytest.raises(RemoteCommandFailed, match="liar does not answer as gpucloud's program for copies does"):
        Copier(LyingHost(said), CODE).listing(["top"])


def test_more_bytes_than_were_asked_for_are_not_taken(tmp_path):
    lying = Copier(LyingHost(rows("x", ""), tells_more=True), CODE)
    with pytest.raises(RemoteCommandFailed, match="26 bytes where 13 were asked for"):
        lying.fetch(lying.listing(["x"]), tmp_path, lambda _: "x")
    assert not (tmp_path / "x").exists()


def test_a_tree_arrives_as_it_is_with_empty_folders_and_the_words_of_its_links(host, there, tmp_path):
    (there / "top" / "d" / "empty").mkdir(parents=True)
    (there / "top" / "d" / "empty").chmod(0o700)
    (there / "top" / "d" / ".hidden.part").write_text("kept")
    texts = {
        "to": "d/.hidden.part",
        "d/up": "../to",
        "d/top": "..",
        "away": "nothing",
        "odd": "./d//empty",
        "loop": "loop",
    }
    for name, text in {**texts, "detour": "d/../to", "back": "../top/to", "full": str(there / "top" / "to")}.items():
        (there / "top" / name).symlink_to(text)
    found = copier(host, there).listing(["top"])
    copier(host, there).fetch(found, tmp_path / "here", lambda _: "")
    arrived = {
        path.relative_to(tmp_path / "here").as_posix(): text_of(path)
        for path in (tmp_path / "here").rglob("*")
        if path.is_symlink()
    }
    assert arrived == {**texts, "detour": "d/.hidden.part", "back": "d/.hidden.part", "full": "d/.hidden.part"}
    assert (tmp_path / "here" / "d" / "empty").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "here" / "detour").read_text() == "kept"


def test_what_is_not_below_another_in_a_bucket_is_left_out_alone_and_told():
    files, refused = fitting({"a": "a", "a/b": "a/b", "c/../../x": "c/../../x", "d": "d"})
    assert sorted(files) == ["a", "d"]
    assert refused == (
        "'a' is no folder, and 'a/b' is to lie in it",
        "'c/../../x' is no name below the folder that it arrives in",
    )
