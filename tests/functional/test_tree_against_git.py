"""git itself is the judge of the ignore rules."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpucloud.adapters.transfer.localfiles import HashCache, read_tree

FOLDERS = ("", "a/", "b/", "a/b/", "cab/", "a/b/a/")
NAMES = ("ab", "a.b", "abc", "-", "]", "!a", "c", "A", "b-", "#", "a ")
PIECES = ("a", "b", "c", ".", "*", "**", "?", "/", "[ab]", "[!a]", "[a-c]", "[c-a]", "[]-]", "[^b-", "\\*", "\\")
PIECES += ("!", "-", "]", "#", " ", "[[:alpha:]]", "[![:punct:]b]", "[\\]a]", "/**", "**/")
ENV = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

rules = st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=4).map("\n".join)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for folder in FOLDERS:
        (root / folder).mkdir(exist_ok=True)
        for name in NAMES:
            (root / folder / name).write_text("")
    subprocess.run(["git", "init", "-q", "."], cwd=root, env=ENV, check=True)
    return root


@settings(max_examples=150)
@given(top=rules, nested=rules)
@example(top="a\r\nb \n/**/c", nested="!ab")
def test_we_send_what_git_would_list(repository: Path, top: str, nested: str):
    (repository / ".gitignore").write_bytes(top.encode())
    (repository / "a" / ".gitignore").write_bytes(nested.encode())
    tree = read_tree(repository, HashCache(None, repository))
    assert {entry.path for entry in tree.entries if entry.sha256} == listed_by_git(repository)


def listed_by_git(root: Path) -> set[str]:
    command = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, env=ENV, check=True, capture_output=True)
    return {os.fsdecode(path) for path in listing.stdout.split(b"\0") if path}
