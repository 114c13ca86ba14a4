"""Code trees as manifests, and ignore rules."""

from __future__ import annotations

import pytest

from gpucloud.domain.job.code import FILE, FOLDER, PROGRAM, Entry, IgnoreRules, Manifest, manifest


def file(path: str, content: str = "a", *, mode: int = FILE, mtime_ns: int = 0) -> Entry:
    return Entry(path=path, size=1, mtime_ns=mtime_ns, mode=mode, sha256=content * 64)


def tree(*entries: Entry) -> Manifest:
    return manifest(entries)


def test_name_of_a_tree_stays_the_same_over_releases():
    # printf "%s" "<mode> <sha256 or -> <path>\\0…" | sha256sum
    empty = Entry(path="out", size=0, mtime_ns=0, mode=FOLDER, sha256=None)
    assert tree(file("b"), file("a", "c"), empty).sha256 == (
        "72c0476ec4334e18eefadceee02de0ba88ee6ed2c88e6f64bac26770b94effdc"
    )


def test_order_and_times_do_not_change_the_name():
    assert tree(file("a"), file("b")).sha256 == tree(file("b", mtime_ns=5), file("a")).sha256


@pytest.mark.parametrize(
    "other",
    [file("a", "b"), file("a", mode=PROGRAM), file("A"), file("a\n")],
    ids=["content", "mode", "case", "line break"],
)
def test_name_changes_with(other: Entry):
    assert tree(file("a")).sha256 != tree(other).sha256


def test_path_that_is_no_utf8_has_a_name_too():
    assert len(tree(file("caf\udce9")).sha256) == 64


RULES = [
    # pattern, path, is_folder, ignored
    ("*.pt", "a.pt", False, True),
    ("*.pt", "deep/down/a.pt", False, True),
    ("/a.pt", "deep/a.pt", False, False),
    ("deep/a.pt", "deep/a.pt", False, True),
    ("deep/a.pt", "x/deep/a.pt", False, False),
    ("build/", "build", True, True),
    ("build/", "build", False, False),
    ("build/", "x/build", True, True),
    ("**/logs", "a/b/logs", True, True),
    ("logs/**", "logs/a/b", False, True),
    ("logs/**", "logs", True, False),
    ("a/**/b", "a/b", False, True),
    ("a/**/b", "a/x/y/b", False, True),
    ("a*b", "a/b", False, False),
    ("[a-c].txt", "b.txt", False, True),
    ("[!a-c].txt", "b.txt", False, False),
    ("[[:digit:]]x", "5x", False, True),
    ("a?c", "abc", False, True),
    ("a?c", "a/c", False, False),
    ("# note", "# note", False, False),
    ("\\# note", "# note", False, True),
    ("\\!x", "!x", False, True),
    ("x   ", "x", False, True),
    ("x\\ ", "x ", False, True),
    ("x\r", "x", False, True),
    ("a.c", "abc", False, False),
    ("", ".git", True, True),
    ("!.gpucloud-setup", ".gpucloud-setup", True, True),
    ("!__pycache__", "m/__pycache__", True, True),
]


@pytest.mark.parametrize(("pattern", "path", "is_folder", "ignored"), RULES)
def test_ignore_rule(pattern: str, path: str, is_folder: bool, ignored: bool):
    assert IgnoreRules().with_file("", pattern).ignored(path, is_folder=is_folder) is ignored


def test_last_match_decides_and_a_nested_file_comes_last():
    rules = IgnoreRules().with_file("", "*.log\n!keep.log\n")
    assert not rules.ignored("keep.log", is_folder=False)
    nested = rules.with_file("sub", "keep.log\n")
    assert nested.ignored("sub/keep.log", is_folder=False)
    assert not nested.ignored("keep.log", is_folder=False)


def test_nested_rule_is_anchored_in_its_own_folder():
    rules = IgnoreRules().with_file("s*b", "/x")
    assert rules.ignored("s*b/x", is_folder=False)
    assert not rules.ignored("sub/x", is_folder=False)
    assert not rules.ignored("s*b/deep/x", is_folder=False)
