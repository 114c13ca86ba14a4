"""The program that nodes run for all that is moved: whole as it is sent, and told what to do by us alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.adapters.transfer.copying import Copier, packed_program, program_argv, program_text, request
from gpucloud.adapters.transfer.localfiles import Sent, local_tree
from gpucloud.adapters.transfer.sync import make_tree
from gpucloud.domain.checkpoint.directory import AfterScript, Unsaved, after_script
from gpucloud.domain.errors import RemoteCommandFailed, StoreError

TEXT = ast.parse(program_text())


def test_its_chapters_have_no_name_in_common():
    defined = [node.name for node in TEXT.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined += [
        name.id
        for node in TEXT.body
        if isinstance(node, ast.Assign)
        for name in ast.walk(node.targets[0])
        if isinstance(name, ast.Name)
    ]
    assert [name for name, count in Counter(defined).items() if count > 1] == []


def test_it_imports_the_standard_library_alone():
    imported = {name.name for node in ast.walk(TEXT) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(TEXT) if isinstance(node, ast.ImportFrom) if node.module}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_what_is_no_operation_of_it_is_refused(tmp_path: Path):
    done = subprocess.run(
        program_argv(sys.executable), input=request(str(tmp_path), "", "erase", paths=["x"]), capture_output=True
    )
    assert (done.returncode, done.stderr) == (1, b"'erase' is no operation\n")


class HereWithoutCode:
    """A node whose commands run here; nothing of a job has run there."""

    node = SimpleNamespace(id="i-1", root="none/of/it")

    def run(self, argv, stdin=b"", timeout_s=None):
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s)
        return SimpleNamespace(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def test_where_nothing_of_a_job_ran_no_repetition_is_advised():
    with pytest.raises(RemoteCommandFailed, match="i-1: there is no code folder on this node") as caught:
        Copier(HereWithoutCode(), python=sys.executable).listing(["results/"])
    assert caught.value.hint == "gpucloud status says which machines the job has: nothing of it ran on this one"


def test_a_request_has_time_for_a_large_file_that_is_hashed_whole_on_a_slow_disk(tmp_path: Path):
    """It was ended after ten minutes, and the same command again after ten more."""
    size, asked = 100 * 10**9, []

    class Slow(HereWithoutCode):
        def run(self, argv, stdin=b"", timeout_s=None):
            op = json.loads(stdin.removeprefix(packed_program()))["op"]
            asked.append((op, timeout_s))
            said = {"stat": [[None, False, size]], "finish": []}[op]
            return SimpleNamespace(exit_code=0, stdout=json.dumps(said).encode(), stderr=b"")

    large = Sent(local=tmp_path / "x", path="x", size=size, mode=0o644, mtime_ns=0, sha256="0" * 64)
    assert Copier(Slow(), str(tmp_path)).send([large]) == 0
    assert asked == [("stat", 600.0), ("finish", 600.0 + 5000)]


def test_stored_code_cannot_choose_an_operation(tmp_path: Path):
    """Others sign what is stored; the line with the operation is ours."""
    asked = {"op": "write", "base": str(tmp_path), "root": "", "pieces": [["x", "0" * 16, 0, 1]]}
    stored = json.dumps(asked).encode() + b"\n!"

    with pytest.raises(StoreError, match="the request arrived damaged"):
        make_tree(tmp_path / "code", "0" * 64, lambda: stored)

    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_the_links_of_a_folder_are_sent_in_their_own_words(tmp_path: Path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_text("text")
    (folder / "b").symlink_to("a")
    (folder / "deep" / "c").symlink_to("../b")
    (folder / "deep" / "top").symlink_to("..")
    (folder / "whole").symlink_to(folder / "b")

    assert local_tree(folder, "to")[1] == (
        ("to/b", "a"),
        ("to/deep/c", "../b"),
        ("to/deep/top", ".."),
        ("to/whole", "a"),
    )


FILES = (".h/x.pt", "a/c.pt", "a/.h/c.pt", "a/b/c.pt", "a/b/d/c.pt", "a[b]/c.pt", "b", "out/.h/x.pt", "out/x.pt")
PATTERNS = """
. ./ a a/ ./a/b a//b/c.pt a[b] nothing * */ ** **/ out/* out/.* out/** out/*/** out/*/ */. */*.pt */*/ a/**/c.pt
a/*/c.pt
a/**/**/c.pt a/**/d/ a/** a/**/** **/c.pt **/x.pt **/.h **/.h/*.pt
[ab] [!a] [a]* ? *b* **b .h/* .*/x.pt out/[.]h a/?/d
"""


@pytest.mark.parametrize("written", PATTERNS.split())
def test_of_what_a_pattern_names_that_comes_which_a_last_checkpoint_is_told_to_come_by(tmp_path, written):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = Copier(HereWithoutCode(), str(tmp_path), python=sys.executable).listing([written])
    came = {str(Path(file.path)) for file in found.files}
    lost = {name: Unsaved(why="away", paths=(name,)) for name in FILES}
    assert came == {name for name in FILES if after_script(lost[name], ".", (written,)) is AfterScript.OVER}
