"""What arrives from machines: where it may lie, what it never goes through, and what is left when it is refused."""

from __future__ import annotations

import errno
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import LandingRefused, StoreError
from gpucloud.domain.untrusted import Arriving, Limits, Tree, judge, judge_together
from gpucloud.store.landing import Landing


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / "here"
    folder.mkdir(parents=True)
    return folder


def files(*names: str) -> Tree:
    return Tree(files=tuple(Arriving(name=name, size=4) for name in names))


def land(root: Path, tree: Tree, data: bytes = b"evil") -> None:
    with Landing(root) as landing:
        landing.expect(tree)
        for file in tree.files:
            with landing.part(file, "x") as part:
                part.write(0, data)
            landing.keep(file, "x")
        landing.settle()


def begin(root: Path, tree: Tree, end: BaseException, data: bytes = b"") -> None:
    """Begin to land, and come to an end in the middle of it."""
    with Landing(root, resumes=True) as landing:
        landing.expect(tree)
        with landing.part(tree.files[0], "x") as part:
            part.write(0, data)
        raise end


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "/x", "a//b", "a/", "a/.", "./a", "../x", "a/../../x", "a/..", "x\0y", "n" * 256,
        "/".join("d" * 101),
        "a/" + "/".join(["n" * 250] * 20), ".gpucloud-landing-0", ".GPUCLOUD-Landing-0/x", "\ud800",
    ],
)  # fmt: skip
def test_a_name_that_is_none_below_the_folder_is_refused(name: str) -> None:
    for tree in (files(name), Tree(links=((name, "x"),)), Tree(folders=((name, 0o755),))):
        with pytest.raises(LandingRefused):
            judge(tree)


@pytest.mark.parametrize("name", ["...", "a..b", " x ", "x.", "a\\..\\b", "new\nline", "\udcff", "-rf", ".profile"])
def test_a_name_that_is_only_odd_arrives(here: Path, name: str) -> None:
    land(here, files(name, f"d/{name}"))
    assert (here / name).read_bytes() == (here / "d" / name).read_bytes() == b"evil"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("x", ""), ("x", "/etc"), ("x", ".."), ("x", "../x"), ("d/x", "../.."), ("d/x", "../../here/d"), ("x", "a\0b"),
        ("z", "p/q/../../../ssh"), ("z", "p/.."), ("d/z", "../p/../../x"), ("x", "./../x"), ("x", "//etc"),
        ("x", "a" * 5000),
    ],
)  # fmt: skip
def test_a_link_that_leads_out_or_could_is_refused(name: str, target: str) -> None:
    with pytest.raises(LandingRefused):
        judge(Tree(links=((name, target),)))


@pytest.mark.parametrize("target", ["x", "./x", "d", "d/e/x", "nothing", ".", "z", "d//e", "../z", "..", "../d/e/x"])
def test_a_link_that_stays_inside_arrives_as_it_is(here: Path, target: str) -> None:
    land(here, Tree(links=(("f/z", target),), files=files("f/d/e/x").files))
    assert os.readlink(here / "f" / "z") == target  # noqa: PTH115  a Path would tidy it


@pytest.mark.parametrize(
    "tree",
    [
        files("a", "a"), files("a", "a/b"), files("a/b", "a"), Tree(files=files("a").files, links=(("a", "b"),)),
        Tree(links=(("a", "b"), ("a", "c"))), Tree(files=files("a/b").files, links=(("a", "c"),)),
        Tree(folders=(("a", 0), ("a", 0))), Tree(folders=(("a", 0),), files=files("a").files),
        Tree(folders=(("a/b", 0),), links=(("a", "c"),)),
    ],
)  # fmt: skip
def test_what_would_take_each_others_place_is_refused(tree: Tree) -> None:
    with pytest.raises(LandingRefused):
        judge(tree)


@pytest.mark.parametrize(
    "names", [("A/x", "a/y"), ("Model", "model"), ("\u00e9", "e\u0301"), ("stra\u00dfe", "STRASSE")]
)
def test_names_that_the_disk_takes_for_the_same_are_refused_where_it_does(
    here: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    judge_together(files(*names))
    land(here, files(*names))
    assert all((here / name).is_file() for name in names)
    monkeypatch.setattr(Landing, "_folds", lambda _: True)
    with pytest.raises(LandingRefused, match="comes twice"):
        land(here, files(*names))


def test_results_whose_names_the_disk_takes_for_the_same_come_under_others_with_what_links_lead_to(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were refused for one, and their machine was ended with them."""
    monkeypatch.setattr(Landing, "_folds", lambda _: True)
    found = files("r/Best.pt", "r/best.pt", "r/best.pt.2", "R/log", "R/deep/log")
    links = (("r/last", "best.pt"), ("r/first", "Best.pt"), ("top", "r/deep/log"))
    tree = replace(found, links=links, folders=(("r", 0o755), ("R", 0o755), ("R/deep", 0o755)))
    for _ in range(2):  # the same names whenever they come
        with Landing(here, adapts=True, aside="before") as landing:
            landing.expect(tree)
            for file in tree.files:
                with landing.part(file, "x") as part:
                    part.write(0, file.name[-4:].encode())
                landing.keep(file, "x")
            landing.settle()
        assert landing.set_aside == []
    assert landing.renamed == {
        "r": "r.2",
        "r/Best.pt": "r.2/Best.pt",
        "r/best.pt": "r.2/best.pt.3",
        "r/best.pt.2": "r.2/best.pt.2",
        "r/first": "r.2/first",
        "r/last": "r.2/last",
    }
    assert (here / "r.2" / "last").readlink() == Path("best.pt.3")
    assert (here / "r.2" / "first").readlink() == Path("Best.pt")
    assert (here / "R" / "deep" / "log").is_file()


def test_a_link_that_would_lead_out_here_alone_is_left_out_of_results_and_keeps_nothing_else_back(here: Path) -> None:
    (here / "mine").symlink_to("/")
    with Landing(here, adapts=True) as landing:
        landing.expect(Tree(links=(("x", "mine/etc"), ("y", "x"), ("z", "a")), folders=(("a", 0o755),)))
        landing.settle()
    assert landing.left_out["x"] == f"a link to 'mine/etc', which leads out through a link in {here}"
    assert everything(here) == sorted({"a", "mine", "z", *({"y"} - landing.left_out.keys())})


def test_more_than_anyone_needs_is_refused() -> None:
    with pytest.raises(LandingRefused, match="3 files, links and folders are to come, and 2 may"):
        judge(files("a", "b", "c"), Limits(entries=2))
    for size in (-1, 1 << 60, 10**400):
        with pytest.raises(LandingRefused):
            judge(Tree(files=(Arriving(name="x", size=size),)))


def test_more_than_the_disk_has_is_refused_before_anything_is_written(here: Path) -> None:
    with pytest.raises(StoreError, match="are to come"):
        land(here, Tree(files=(Arriving(name="x", size=1 << 52),)))
    assert everything(here) == []


def test_a_disk_that_is_full_already_says_how_much_is_to_come(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Landing, "_open", full)
    with pytest.raises(StoreError, match=r"No space left on device; 4 GiB are to come"):
        land(here, Tree(files=(Arriving(name="x", size=1 << 32),)))


@pytest.mark.parametrize("name", ["out/x", "in/out/x", "out"])
def test_nothing_goes_through_a_link_that_lies_here(here: Path, name: str) -> None:
    outside = here.parent / "outside"
    outside.mkdir()
    (here / "in").mkdir()
    (here / "out").symlink_to(outside)
    (here / "in" / "out").symlink_to(outside)
    if name == "out":  # a file takes the link's place: it is not written through it
        land(here, files(name))
        assert not (here / "out").is_symlink()
    else:
        with pytest.raises(StoreError, match="out is a link; files go into folders"):
            land(here, files("first", name))
        assert not (here / "first").exists()
    assert list(outside.iterdir()) == []


def test_a_file_that_a_link_here_names_is_not_overwritten(here: Path) -> None:
    (here.parent / "profile").write_text("mine")
    (here / "model").symlink_to(here.parent / "profile")
    land(here, files("model"))
    assert ((here.parent / "profile").read_text(), (here / "model").read_bytes()) == ("mine", b"evil")


def test_a_new_link_may_not_lead_out_through_one_that_lies_here(here: Path) -> None:
    (here / "mine").symlink_to("/")
    (here / "back").symlink_to(here)
    (here / "deep").mkdir()
    (here / "deep" / "up").symlink_to("../..")
    for links in ((("x", "mine/etc"),), (("x", "y/up/z"), ("y", "deep")), (("d/x", "../mine"),)):
        with pytest.raises(LandingRefused, match="leads out through a link"):
            land(here, Tree(links=links))
    land(here, Tree(links=(("x", "back/deep"), ("loop", "pool"), ("pool", "loop"))))
    assert (here / "x").is_symlink()


def test_a_folder_or_a_device_here_is_never_replaced_by_a_file(here: Path) -> None:
    (here / "folder").mkdir()
    os.mkfifo(here / "pipe")
    for name in ("folder", "pipe"):
        for tree in (files("a", name), Tree(links=((name, "a"),))):
            with pytest.raises(StoreError, match="a file is to come there"):
                land(here, tree)
    with pytest.raises(StoreError, match="pipe is no folder"):
        land(here, files("pipe/x"))
    assert everything(here) == ["folder", "pipe"]


def test_a_folder_that_becomes_a_link_meanwhile_is_not_gone_through(here: Path) -> None:
    outside = here.parent / "outside"
    outside.mkdir()
    tree = files("d/x")
    with Landing(here) as landing:
        landing.expect(tree)
        landing.keep(tree.files[0], "x")
        (here / "d").symlink_to(outside)
        with pytest.raises(StoreError, match="d is a link"):
            landing.settle()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("ends", [None, LandingRefused("x")], ids=["that came", "that was refused"])
def test_a_landing_leaves_what_another_was_cut_off_at_until_nobody_goes_on_with_it_for_a_week(
    here: Path, monkeypatch: pytest.MonkeyPatch, ends: LandingRefused | None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(here, files("big/x"), KeyboardInterrupt(), b"evi")

    def other() -> None:
        if ends is None:
            land(here, files("small"))
        else:
            with pytest.raises(LandingRefused):
                begin(here, files("small"), ends, b"evil")

    other()
    with Landing(here, resumes=True) as landing:
        landing.expect(files("big/x"))
        assert landing.part(files("big/x").files[0], "x").length() == 3
    monkeypatch.setattr("gpucloud.store.landing.time.time", lambda before=time.time: before() + 7 * 24 * 3600 + 60)
    other()
    assert list(here.glob(".gpucloud-landing-*")) == []


def test_what_another_landing_left_is_no_room_for_this_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(here, files("x"), KeyboardInterrupt(), b"e" * (1 << 20))
    free = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda _: free)
    for name, is_taken in (("x", True), ("small", False)):
        tree = Tree(files=(Arriving(name=name, size=1 << 20),))
        with (
            Landing(here, resumes=True) as landing,
            nullcontext() if is_taken else pytest.raises(StoreError, match="to come"),
        ):
            landing.expect(tree)


@pytest.mark.parametrize("planted", ["link", "hard link", "pipe"])
def test_a_part_that_is_not_ours_alone_is_begun_anew(here: Path, planted: str) -> None:
    (here.parent / "profile").write_bytes(b"mine")
    tree = files("x")
    with pytest.raises(KeyboardInterrupt):
        begin(here, tree, KeyboardInterrupt(), b"e")
    (part,) = here.glob(".gpucloud-landing-0/*")
    part.unlink()
    if planted == "link":
        part.symlink_to(here.parent / "profile")
    elif planted == "pipe":
        os.mkfifo(part)
    else:
        part.hardlink_to(here.parent / "profile")
    land(here, tree)
    assert ((here.parent / "profile").read_bytes(), (here / "x").read_bytes()) == (b"mine", b"evil")
    assert everything(here) == ["x"]


@pytest.mark.parametrize("planted", ["link", "open to all"])
def test_a_folder_for_parts_that_is_not_ours_alone_is_left_alone(here: Path, planted: str) -> None:
    outside = here.parent / "outside"
    outside.mkdir()
    if planted == "link":
        (here / ".gpucloud-landing-0").symlink_to(outside)
    else:
        (here / ".gpucloud-landing-0").mkdir()
        (here / ".gpucloud-landing-0").chmod(0o777)
    land(here, files("x"))
    assert everything(here) == [".gpucloud-landing-0", "x"]
    assert list(outside.iterdir()) == []


def test_two_landings_in_one_folder_do_not_meet(here: Path) -> None:
    tree = files("x")
    with Landing(here) as one, Landing(here) as other:
        for landing, data in ((one, b"one"), (other, b"two")):
            landing.expect(tree)
            with landing.part(tree.files[0], "") as part:
                part.write(0, data)
            landing.keep(tree.files[0], "")
        one.settle()
        assert (here / "x").read_bytes() == b"one"
        other.settle()
    assert (here / "x").read_bytes() == b"two"
    assert everything(here) == ["x"]


def test_a_refused_tree_leaves_no_trace_and_one_that_was_cut_off_what_goes_on(here: Path) -> None:
    root = here / "new" / "folder"
    with pytest.raises(LandingRefused):
        land(root, Tree(files=files("good").files, links=(("bad", "/"),)))
    with pytest.raises(LandingRefused):
        begin(root, files("good"), LandingRefused("meanwhile"))
    assert everything(here) == []
    with pytest.raises(KeyboardInterrupt):
        begin(root, files("good"), KeyboardInterrupt(), b"ev")
    with Landing(root) as landing:
        landing.expect(files("good"))
        with landing.part(Arriving(name="good", size=4), "x") as part:
            assert part.length() == 2


def test_modes_and_times_arrive_but_nothing_that_others_may_write_or_that_runs_as_another(here: Path) -> None:
    x = Arriving(name="d/x", size=4, mode=0o6777, mtime_ns=10**18)
    tree = Tree(
        files=(x, Arriving(name="y", size=4, mode=0, mtime_ns=-1)),
        folders=(("d", 0o7777), ("empty", 0)),
    )  # fmt: skip
    land(here, tree)
    modes = [(here / name).stat().st_mode & 0o7777 for name in ("d/x", "y", "d", "empty")]
    assert modes == [0o755, 0o600, 0o755, 0o700]
    assert ((here / "d" / "x").stat().st_mtime_ns, (here / "y").stat().st_mtime_ns) == (10**18, 0)


def test_a_long_name_is_cut_for_what_is_set_aside(here: Path) -> None:
    name = "ä" * 127
    (here / name).write_text("mine")
    with Landing(here, aside="before-attempt-1") as landing:
        file = Arriving(name=name, size=4)
        landing.expect(Tree(files=(file,)))
        with landing.part(file, "x") as part:
            part.write(0, b"evil")
        landing.keep(file, "x")
        landing.settle()
    (kept,) = landing.set_aside
    assert (kept.read_text(), kept.suffix, (here / name).read_text()) == ("mine", ".before-attempt-1", "evil")


def listings(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a folder is listed while so many files arrive that differ, half of them as once before."""
    root.mkdir()
    names = [f"{n}.txt" for n in range(count)]
    for name in names:
        (root / name).write_bytes(b"mine")
    for name in names[::2]:
        (root / f"{name}.before-attempt-1.2").write_bytes(b"mine")
    listed: list[object] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda at: listed.append(at) or listdir(at))  # type: ignore[func-returns-value]
    with Landing(root, aside="before-attempt-3") as landing:
        tree = files(*names)
        landing.expect(tree)
        for file in tree.files:
            with landing.part(file, "h") as part:
                part.write(0, b"evil")
            landing.keep(file, "h")
        landing.settle()
    monkeypatch.undo()
    assert sorted(path.name for path in landing.set_aside) == sorted(f"{one}.before-attempt-3" for one in names[1::2])
    return len(listed)


def test_a_folder_is_listed_once_however_many_of_its_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listings(tmp_path / "many", 40, monkeypatch) == listings(tmp_path / "few", 4, monkeypatch)


def test_a_link_of_the_users_is_not_given_a_name_that_what_arrives_may_lead_through(here: Path) -> None:
    (here / "notes").symlink_to("../../home")
    with Landing(here, aside="before") as landing:
        landing.expect(Tree(files=(Arriving(name="notes", size=4),), links=(("x", "notes.before"),)))
        with landing.part(Arriving(name="notes", size=4), "x") as part:
            part.write(0, b"evil")
        landing.keep(Arriving(name="notes", size=4), "x")
        landing.settle()
    assert landing.set_aside == []
    assert not (here / "x").exists()
