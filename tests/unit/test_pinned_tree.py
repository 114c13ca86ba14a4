"""A tree of code that lies in a store is made here as what was signed, or not at all: its signer is not its reader."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
import zlib

import pytest

from gpucloud.adapters.home import Home
from gpucloud.adapters.keys import KeyRing
from gpucloud.adapters.transfer import node_trees
from gpucloud.adapters.transfer.sync import make_tree
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job import code
from gpucloud.domain.job.code import LARGEST_CODE_BYTES
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.state.order import sealed
from gpucloud.domain.untrusted import landing_of
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.wiring import Gpucloud
from tests.unit.worlds import job, order

FILE, LINK, FOLDER = code.FILE, code.LINK, code.FOLDER


def sha256_of(content):
    return hashlib.sha256(content).hexdigest()


def row(path, content=b"", mode=FILE, size=None, mtime_ns=0):
    return [path, len(content) if size is None else size, mtime_ns, mode, sha256_of(content)]


def kept(rows, *contents):
    """Return the name of the tree with these rows, and what the store would hold of it."""
    lines = (f"{row[3]:o} {row[4] or '-'} {row[0]}\0".encode("utf-8", "surrogatepass") for row in rows)
    return sha256_of(b"".join(lines)), request(json.dumps(rows).encode(), *contents)


def request(text, *contents):
    packed = zlib.compress(text, 9)
    head = json.dumps([len(packed), [[sha256_of(content), len(content)] for content in contents]])
    return b"".join([head.encode(), b"\n", packed, *contents])


def made(tmp_path, rows, *contents):
    name, data = kept(rows, *contents)
    return make_tree(tmp_path / "code", name, lambda: data)


def test_a_trusted_friends_code_writes_nothing_outside_of_its_tree(tmp_path, monkeypatch):
    for name in ("GPUCLOUD_SIGNING_KEY", "GPUCLOUD_TRUSTED_KEYS", "GPUCLOUD_SSH_KEY"):
        monkeypatch.delenv(name, raising=False)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "authorized_keys").write_text("my own")
    link, text = str(mine).encode(), b"the friend's"
    sha256, data = kept([row("a", link, LINK), row("a/authorized_keys", text)], link, text)
    friend, cloud = KeyRing(tmp_path / "friend", {}).signer(), Gpucloud(Home(tmp_path / "home"))
    cloud.keys().add("friend", friend.line)
    jobs = JobStore(open_store(str(tmp_path / "store")), "digits")
    jobs.keep_code(sha256, data)
    theirs = order(jobs.store.url, host="there", code_sha256=sha256, resolved=job(cloud=Cloud.AWS))
    jobs.put_order(sealed(theirs, friend.key_id, friend.sign(sealed(theirs).signed)), None)
    known = KnownJob(name="digits", store=jobs.store.url, file=tmp_path / "job.yaml", cloud=Cloud.AWS)

    with pytest.raises(StoreError, match="'a' is no folder"):
        cloud.ordered(known).to_go_on(cloud.orders(known).acted_on())

    assert (mine / "authorized_keys").read_text() == "my own"
    assert list(mine.iterdir()) == [mine / "authorized_keys"]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row("a"), row("a/b")], "'a' is no folder"),
        ([row("a/b/c"), row("a", mode=LINK)], "'a' is no folder"),
        ([row("a"), row("a")], "comes twice"),
        ([row("../a")], "leaves the tree"),
        ([row("/a")], "leaves the tree"),
        ([row("")], "leaves the tree"),
        ([row("a//b")], "leaves the tree"),
        ([row("./a")], "leaves the tree"),
        ([row("a\0b")], "leaves the tree"),
        ([row("\ud800")], "is no name"),
        ([row("a" * 256)], "is too long"),
        ([row("/".join("a" * 101))], "is too long"),
        ([row("a", mode=0o104755)], "neither file"),
        ([row("a", mode=0o010644)], "neither file"),
        ([row("a", mode=True)], "neither file"),
        ([row("a", size=-1)], "neither file"),
        ([row("a", mtime_ns=1 << 63)], "neither file"),
        ([["a", 0, 0, FILE, None]], "neither file"),
        ([["a", 0, 0, FOLDER, "0" * 64]], "neither file"),
        ([["a", 0, 0, FILE, "../../x"]], "neither file"),
        ([["a", 0, 0, FILE, "0" * 63 + "\n"]], "neither file"),
        ([row("a", size=LARGEST_CODE_BYTES), row("b", size=1)], f"and {LARGEST_CODE_BYTES} may be"),
        ([row("\x1b]0;x\n::stop-commands::x/..")], r"\\x1b\]0;x\\n::stop"),
    ],
)
def test_rows_that_cannot_lie_beside_each_other_in_one_folder_are_refused_before_anything_is_made(tmp_path, rows, why):
    with pytest.raises(StoreError, match=why) as caught:
        made(tmp_path, rows, b"")

    assert "\n" not in caught.value.message
    assert [path.name for path in (tmp_path / "code").rglob("*") if not path.name.startswith(".")] == []


LINKS = [
    "/etc",
    "..",
    "../x",
    "x/../..",
    "x/..",
    "d/../../x",
    "",
    "a\0b",
    "./../..",
    "x/./../y",
    "b",
    "./b",
    "d//b",
    ".",
]


@pytest.mark.parametrize("target", [link for link in LINKS if landing_of("a", link) is None])
def test_a_link_that_leads_out_or_could_is_not_made(tmp_path, target):
    content = target.encode()

    with pytest.raises(StoreError):
        made(tmp_path, [row("a", content, LINK)], content)

    assert [path for path in (tmp_path / "code").rglob("*") if path.is_symlink()] == []


@pytest.mark.parametrize("target", [*LINKS, "../b", "../../b", "../d/../b"])
@pytest.mark.parametrize("name", ["a", "d/a", "d/e/a"])
def test_the_rule_for_links_is_that_of_all_that_arrives(name, target):
    assert node_trees.stays(name, target) == (landing_of(name, target) is not None)


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a"), ("a", "a")])
def test_names_are_judged_together_whatever_the_tree_is_called(names):
    rows = [row(name, mode=LINK) for name in names]
    with pytest.raises(SystemExit, match=r"no folder|twice"):
        node_trees._parsed(json.dumps(rows).encode(), kept(rows)[0])


def test_the_kinds_of_entries_are_those_of_a_manifest():
    assert set(node_trees.MODES) == {code.FILE, code.PROGRAM, code.LINK, code.FOLDER}


def test_a_tree_with_all_kinds_of_entries_is_made_and_put_right(tmp_path):
    rows = [row("d/a", b"text", code.PROGRAM), row("d/up", b"../l", LINK), row("l", b"d/a", LINK)]
    rows.append(["d/e", 0, 0, FOLDER, None])
    contents = (b"text", b"../l", b"d/a")
    root = made(tmp_path, rows, *contents)
    (root / "d" / "a").unlink()
    (root / "d" / "a").symlink_to(tmp_path)

    assert made(tmp_path, rows, *contents) == root
    assert ((root / "d" / "up").read_text(), (root / "d" / "a").is_symlink()) == ("text", False)
    assert (root / "d" / "a").stat().st_mode & 0o777 == 0o755
    assert (root / "d" / "e").is_dir()


def test_a_link_that_a_disk_takes_for_the_folder_is_not_written_through(tmp_path):
    """As on a Mac, where `A` and `a` are one name."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").symlink_to(tmp_path)

    with pytest.raises(SystemExit, match="'a' is no folder on this disk"):
        node_trees._make_folder(tmp_path / "tree", "a/b", set())

    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("said", [1, 3, 1000])
def test_a_content_of_another_size_than_its_row_says_is_not_it(tmp_path, said):
    with pytest.raises(StoreError, match="missing"):
        made(tmp_path, [row("a", b"12", size=said)], b"12")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    first = made(tmp_path, [row("a", b"12")], b"12")
    (first / "a").unlink()
    os.mkfifo(first / "a")

    second = made(tmp_path, [row("a", b"12"), row("b")], b"12", b"")

    assert (second / "a").read_text() == "12"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 10_000_000, "too large"),
        (b'[1, [["' + b"0" * 64 + b'", ' + b"9" * 1_000_000 + b"]]]\n", "damaged"),
        (b"[-1, []]\n" + b"x" * 1000, "damaged"),
        (b"[99999999999999, []]\n", "too large"),
        (b"[7, []]\nno zlib", "damaged"),
        (b"{}\n", "damaged"),
        (b"", "missing"),
    ],
    ids=["nested", "digits", "negative", "huge", "no zlib", "no list", "nothing"],
)
def test_what_is_no_request_is_refused_in_one_line(tmp_path, data, why):
    with pytest.raises(StoreError, match=why) as caught:
        make_tree(tmp_path / "code", "0" * 64, lambda: data)

    assert "\n" not in caught.value.message


def test_a_few_bytes_of_a_store_do_not_take_the_memory():
    bomb = zlib.compressobj(1)
    packed = b"".join(bomb.compress(b" " * (1 << 20)) for _ in range(250)) + bomb.flush()
    tracemalloc.start()
    try:
        with pytest.raises(SystemExit, match="too large"):
            node_trees._parsed(node_trees._unpacked(packed), "0" * 64)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_that_is_short_enough_is_not_parsed_into_more_than_a_tree_has():
    with pytest.raises(SystemExit, match="too large"):
        node_trees._parsed(b"[" + b"[]," * (2 * node_trees.MOST_ENTRIES) + b"[]]", "0" * 64)


@pytest.mark.parametrize("name", ["../../x", "0" * 63, "0" * 64 + "\n", "", "\x1b]0;x\x07"])
def test_what_is_no_name_of_a_tree_leads_nowhere(tmp_path, name):
    with pytest.raises(StoreError, match="names no tree"):
        make_tree(tmp_path / "code", name, lambda: pytest.fail("it was asked for"))
