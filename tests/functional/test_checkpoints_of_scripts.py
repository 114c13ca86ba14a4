"""`gpucloud checkpoints` over the checkpoints of a script that saves by itself: its files, as it wrote them."""

import json
from pathlib import Path

import pytest

from gpucloud.agent.scripts.script import CheckpointLocation, look
from gpucloud.agent.scripts.taking import Taking, Took
from gpucloud.cli.commands.checkpoints import Asked, checkpoints
from gpucloud.domain.checkpoint.directory import object_name
from gpucloud.domain.checkpoint.layouts import Rule
from gpucloud.domain.checkpoint.manifest import Commit, Level, Manifest, Promise
from gpucloud.domain.errors import UsageError
from tests.standins.made_checkpoints import known_job

FILES = {
    "checkpoint-20/model.bin": b"weights" * 1000,
    "checkpoint-20/a b%2F+ü.json": b"{}",
    "checkpoint-20/empty": b"",
    "checkpoint-20/deep/trainer_state.json": b"{}",
    "checkpoint-20/trainer_state.json": b'{"global_step": 20}',
}


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A job whose script wrote FILES, as the keeper of its node has committed them."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store, found = known_job(tmp_path, "hf")
    for path, data in FILES.items():
        (tmp_path / "out" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / path).write_bytes(data)
    location = CheckpointLocation(store.url, found.checkpoints, keep=2)
    location.checkpoints.begin(base=None, attempt=1)
    taking, listing = Taking(location, tmp_path / "copies", Rule(), print), look(tmp_path / "out")
    (one,) = taking.sets(tmp_path / "out", listing).sets
    assert taking.take(tmp_path / "out", one, one.content(listing), proven=True) is Took.SAVED
    return found


def answer(capsys, **asked):
    code = checkpoints("hf", Asked(**asked), as_json=True)
    return code, json.loads(capsys.readouterr().out)


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_they_are_listed_and_verified_like_any_other(jobs, capsys):
    (one,) = answer(capsys)[1]["checkpoints"]
    assert (one["step"], one["objects"], one["level"], one["marks"]) == (20, 5, "best_effort", ["next", "kept"])
    assert one["reason"] == "what a resume continues is up to the script, which saves by itself"
    assert checkpoints("hf", Asked(), as_json=False) == 0
    assert capsys.readouterr().out.endswith(f"\n\nbest_effort: {one['reason']}\n")
    assert answer(capsys, verify=True)[0] == 0
    file = Path(jobs.store.root) / jobs.checkpoints / "data/000001/000000020/files/checkpoint-20/model.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert checkpoints("hf", Asked(verify=True), as_json=False) == 15
    said = capsys.readouterr().out
    assert said.endswith("data/000001/000000020/files/checkpoint-20/model.bin is not as it was written\n")


def test_a_pull_gives_the_files_back_as_the_script_wrote_them(jobs, capsys, tmp_path):
    code, found = answer(capsys, pull=Path("here"))
    assert (code, found["step"], found["files"], found["fetched_bytes"]) == (0, 20, 5, found["bytes"])
    assert contents(tmp_path / "here") == FILES
    assert {path: (tmp_path / "here" / path).stat().st_mtime_ns for path in FILES} == {
        path: (tmp_path / "out" / path).stat().st_mtime_ns for path in FILES
    }
    assert checkpoints("hf", Asked(pull=Path("here")), as_json=False) == 0
    assert capsys.readouterr().out == (
        "step 20 is in here, as the script wrote it: 5 files, 6.9 KiB, 6.9 KiB of it was there\n"
    )
    (tmp_path / "here/checkpoint-20/model.bin").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is there already, with other content"):
        checkpoints("hf", Asked(pull=Path("here")), as_json=False)
    assert (tmp_path / "here/checkpoint-20/model.bin").read_bytes() == b"mine"


def test_files_of_several_nodes_lie_apart_only_where_they_differ(jobs, tmp_path):
    location = CheckpointLocation(jobs.store.url, jobs.checkpoints, keep=2)
    location.checkpoints.go_on(1, base=None)
    for step, texts in ((30, (b"same", b"same")), (40, (b"one", b"two"))):
        commit = Commit(1, step)
        pieces = [
            location.checkpoints.upload(commit, object_name(f"s/{name}", node), memoryview(data))
            for node, text in enumerate(texts)
            for name, data in (("shared", text), (f"own-{node}", b"own"))
        ]
        location.checkpoints.commit(
            Manifest(commit=commit, world=2, promise=Promise(Level.BEST_EFFORT), pieces=tuple(pieces))
        )
        checkpoints("hf", Asked(pull=Path(str(step))), as_json=True)
    assert sorted(contents(tmp_path / "30")) == ["s/own-0", "s/own-1", "s/shared"]
    assert sorted(contents(tmp_path / "40")) == [
        "node-0/s/own-0", "node-0/s/shared", "node-1/s/own-1", "node-1/s/shared",
    ]  # fmt: skip


def test_an_export_is_refused_in_one_line_that_says_what_is_possible(jobs, tmp_path):
    with pytest.raises(UsageError) as raised:
        checkpoints("hf", Asked(export=Path("w.safetensors")), as_json=False)
    assert str(raised.value) == (
        "the checkpoint of step 20 cannot be exported: it holds files of the script's own checkpoint directory, "
        "not tensors by name"
    )
    assert raised.value.hint.startswith("--pull DIR brings it as it is")
    assert not (tmp_path / "w.safetensors").exists()
