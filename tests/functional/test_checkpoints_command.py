"""`gpucloud checkpoints` as its user meets it: answers, exit codes, and what it leaves alone."""

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.cli.commands.checkpoints import Asked, checkpoints
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Notes,
    Why,
    best_bytes,
    best_key,
    commit_key,
    data_key,
    seal,
    unseal,
)
from gpucloud.domain.errors import CheckpointUnreadable, LeaseHeld, StoreError, UsageError
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy
from gpucloud.domain.state.state import Attempt, JobStatus, Member, UsageInterval
from gpucloud.store import newest_commit
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders
from tests.standins.made_checkpoints import Made, known_job, state

RANK = "rank-00000-of-00001.safetensors"


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A job that is known here, ended, with checkpoints of steps 10 to 40 and one that was never committed."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store, found = known_job(tmp_path, "made")
    for step in (10, 20, 30, 40):
        one = Made(store, found.checkpoints, Commit(1, step))
        metadata = state(one)
        one.put([list(one.tensors)], metadata, why=Why.LAST if step == 40 else Why.DUE)
    store.put(f"{found.checkpoints}/{data_key(Commit(1, 50), 'rank-00000-of-00001.safetensors')}", b"torn")
    return found


def answer(capsys, **asked):
    code = checkpoints("made", Asked(**asked), as_json=True)
    return code, json.loads(capsys.readouterr().out)


def test_the_list_says_what_a_restore_takes_and_what_stays(jobs, capsys):
    code, found = answer(capsys)
    assert (code, found["version"], found["job"]) == (0, 1, "made")
    assert [
        (one["step"], one["marks"], one["objects"], one["ranks"], one["level"], one["why"])
        for one in found["checkpoints"]
    ] == [
        (40, ["next", "kept"], 1, 1, "exact", "last"),
        (30, ["kept"], 1, 1, "exact", "due"),
        (20, ["kept"], 1, 1, "exact", "due"),
        (10, [], 1, 1, "exact", "due"),
    ]
    assert checkpoints("made", Asked(), as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "generation", "committed", "(UTC)", "size", "objects", "ranks", "level", "why"]
    assert lines[1].endswith("exact  last  restored first, kept")


def test_damage_is_told_by_object_and_part_with_exit_code_15(jobs, capsys):
    assert answer(capsys, verify=True)[0] == 0
    key = data_key(Commit(1, 30), "rank-00000-of-00001.safetensors")
    place = Path(jobs.store.root) / jobs.checkpoints / key
    data = bytearray(place.read_bytes())
    data[100] ^= 4
    place.write_bytes(data)
    code, found = answer(capsys, verify=True)
    assert code == 15
    assert [(one["step"], one["whole"]) for one in found["verified"]] == [
        (40, True),
        (30, False),
        (20, True),
        (10, True),
    ]
    assert found["verified"][1]["damaged"] == [{"object": key, "part": 1, "what": "is not as it was written"}]
    assert answer(capsys, verify=True, step=20)[0] == 0
    assert checkpoints("made", Asked(verify=True, step=30), as_json=False) == 15
    assert capsys.readouterr().out == f"part 1 of 1 of {key} is not as it was written\n"
    (Path(jobs.store.root) / jobs.checkpoints / commit_key(Commit(1, 20))).write_text("{}")
    code, found = answer(capsys, verify=True, step=20)
    assert (code, found["verified"]) == (
        15,
        [{"step": 20, "generation": 1, "bytes": None, "whole": False, "damaged": []}],
    )


def of_another_format(jobs, step):
    place = Path(jobs.store.root) / jobs.checkpoints / commit_key(Commit(1, step))
    place.write_bytes(seal({**unseal(place.read_bytes()), "format": 999}))


def test_where_nothing_could_be_read_nothing_was_verified_with_exit_code_15(jobs, capsys):
    for step in (10, 20, 30, 40):
        of_another_format(jobs, step)
    code, found = answer(capsys, verify=True)
    assert (code, [one["whole"] for one in found["verified"]]) == (15, [None] * 4)
    assert checkpoints("made", Asked(verify=True, step=40), as_json=False) == 15
    assert capsys.readouterr().out == "nothing was verified\n"


def test_what_a_newer_gpucloud_saved_is_no_damage_is_not_pruned_and_comes_before_older_ones(jobs, capsys):
    of_another_format(jobs, 40)
    says = "checkpoint 40 (generation 1) is of another gpucloud's format"
    code, found = answer(capsys, verify=True)
    assert (code, [(one["step"], one["whole"]) for one in found["verified"]]) == (
        0,
        [(40, None), (30, True), (20, True), (10, True)],
    )
    assert checkpoints("made", Asked(verify=True), as_json=False) == 0
    printed = capsys.readouterr()
    assert (printed.out[:24], printed.err) == ("whole: step 30, 20, 10; ", f"not verified: {says}\n")
    assert [(one["step"], one["marks"]) for one in answer(capsys)[1]["checkpoints"]] == [
        (40, ["kept", "other_format"]),
        (30, ["kept"]),
        (20, ["kept"]),
        (10, ["kept"]),
    ]
    assert answer(capsys, prune=True)[1]["checkpoints"] == []
    with pytest.raises(CheckpointUnreadable, match="is of another gpucloud's format") as refused:
        checkpoints("made", Asked(pull=Path("here")), as_json=True)
    assert refused.value.hint == "the gpucloud that saved it, or --step 30"
    assert answer(capsys, pull=Path("here"), step=30)[1]["step"] == 30
    newest = newest_commit(jobs.store, jobs.checkpoints)
    assert newest is not None
    assert newest.step == 40


class Collected:
    """A store whose job deletes a checkpoint, its manifest first, once its manifests were read."""

    def __init__(self, jobs, step):
        self.jobs, self.left = jobs, [commit_key(Commit(1, step)), data_key(Commit(1, step), RANK)]

    def __getattr__(self, name):
        if name == "read_into":
            while self.left:
                self.jobs.store.delete(f"{self.jobs.checkpoints}/{self.left.pop(0)}")
        return getattr(self.jobs.store, name)


@pytest.fixture
def collecting(jobs, monkeypatch):
    def begin(step):
        store = Collected(jobs, step)
        monkeypatch.setattr(
            "gpucloud.cli.commands.checkpoints.StoredCheckpoints",
            lambda **given: StoredCheckpoints(**{**given, "store": store}),
        )

    return begin


def test_what_a_job_that_trains_collects_while_it_is_verified_is_no_damage(collecting, capsys):
    collecting(10)
    code, found = answer(capsys, verify=True)
    assert (code, [one["step"] for one in found["verified"]]) == (0, [40, 30, 20])
    collecting(20)
    with pytest.raises(StoreError, match="deleted while it was read, as the job needs it no longer: step 20"):
        checkpoints("made", Asked(verify=True, step=20), as_json=True)


@pytest.mark.parametrize("asked", [{"pull": Path("here")}, {"export": Path("w.safetensors")}])
def test_what_a_job_that_trains_collects_while_it_is_brought_is_no_damage(collecting, asked):
    collecting(10)
    with pytest.raises(StoreError, match="was deleted while it was read: the job needs it no longer") as told:
        checkpoints("made", Asked(step=10, **asked), as_json=True)
    assert told.value.hint is not None
    assert told.value.hint.startswith("the same command again, without --step")


def test_an_export_into_a_folder_names_both_files_and_writes_over_nothing_but_its_own(jobs, capsys, tmp_path):
    one = Made(jobs.store, jobs.checkpoints, Commit(1, 60))
    metadata = state(one)
    one.put([list(one.tensors)], metadata, notes=Notes(values={"config": {"layers": 2}}))
    (out := tmp_path / "out").mkdir()
    for name in ("config.json", "model.safetensors"):
        (out / name).write_text("mine")
        with pytest.raises(UsageError, match=f"{name} is there already") as refused:
            checkpoints("made", Asked(export=Path("out")), as_json=True)
        assert refused.value.hint == "name another folder, or move it away"
        assert [path.read_text() for path in out.iterdir()] == ["mine"]
        (out / name).unlink()
    assert checkpoints("made", Asked(export=Path("out")), as_json=False) == 0
    assert capsys.readouterr().out.endswith("; out/config.json\n")
    found = answer(capsys, export=Path("out"))[1]
    assert (found["step"], found["config"]) == (60, str(out / "config.json"))
    assert json.loads((out / "config.json").read_text()) == {"layers": 2}


def test_a_later_export_replaces_the_config_that_came_with_the_earlier_one_and_no_other(jobs, capsys, tmp_path):
    (out := tmp_path / "out").mkdir()

    def exported(step):
        one = Made(jobs.store, jobs.checkpoints, Commit(1, step))
        metadata = state(one)
        one.put([list(one.tensors)], metadata, notes=Notes(values={"config": {"step": step}}))
        assert answer(capsys, export=Path("out"))[1]["step"] == step
        return json.loads((out / "config.json").read_text())

    assert [exported(60), exported(70)] == [{"step": 60}, {"step": 70}]
    (out / "config.json").write_text('{"step": 70, "by hand": 1}')
    with pytest.raises(UsageError, match=r"config\.json is there already, and differs"):
        exported(80)


def test_an_export_that_was_cut_off_between_its_two_files_is_followed_by_the_next(jobs, capsys, monkeypatch, tmp_path):
    (out := tmp_path / "out").mkdir()

    def export(step):
        one = Made(jobs.store, jobs.checkpoints, Commit(1, step))
        metadata = state(one)
        one.put([list(one.tensors)], metadata, notes=Notes(values={"config": {"step": step}}))
        checkpoints("made", Asked(export=Path("out")), as_json=True)

    def dies(*_, **__):
        raise SystemExit

    export(60)
    for step in (70, 80):
        with monkeypatch.context() as cut:
            cut.setattr("gpucloud.cli.commands.checkpoints.write_whole", dies)
            with pytest.raises(SystemExit):
                export(step)
        assert json.loads((out / "config.json").read_text()) == {"step": 60}
    export(90)
    assert json.loads((out / "config.json").read_text()) == {"step": 90}


def test_pruning_shows_first_and_deletes_with_yes_what_is_not_kept(jobs, capsys):
    before = jobs.store.list("")
    code, found = answer(capsys, prune=True)
    assert (code, found["deleted"], [one["step"] for one in found["checkpoints"]]) == (0, False, [10])
    assert found["unfinished_objects"] == 1
    assert jobs.store.list("") == before
    assert answer(capsys, prune=True, yes=True)[1]["deleted"] is True
    assert [one["step"] for one in answer(capsys)[1]["checkpoints"]] == [40, 30, 20]
    assert not [key for key in jobs.store.list("") if "000000050" in key or "000000010" in key]
    assert answer(capsys, prune=True)[1]["checkpoints"] == []


def test_nothing_is_pruned_while_the_job_trains_or_is_supervised(jobs):
    with take(jobs, SystemClock()) as lease:
        with pytest.raises(LeaseHeld):
            checkpoints("made", Asked(prune=True, yes=True), as_json=True)
        at = datetime(2026, 1, 2, tzinfo=timezone.utc)
        attempt = Attempt(number=1, members=(Member(node_id="a", rank=0),), port=1, started_at=at)
        lease.write(replace(lease.state, attempts=(attempt,)))
    before = [key for key in jobs.store.list("") if "checkpoints" in key]
    for yes in (False, True):
        with pytest.raises(UsageError, match="is not at its end: it trains, or has trained"):
            checkpoints("made", Asked(prune=True, yes=yes), as_json=True)
    assert [key for key in jobs.store.list("") if "checkpoints" in key] == before


@pytest.mark.parametrize(
    ("status", "stands", "ends"),
    [(JobStatus.SUCCEEDED, "has succeeded", "them"), (JobStatus.WAITING, "is not at its end", "it")],
)
def test_nothing_is_pruned_of_a_job_whose_machines_may_be_there(jobs, status, stands, ends):
    at = datetime(2026, 1, 2, tzinfo=timezone.utc)
    with take(jobs, SystemClock()) as lease:
        kept = UsageInterval(node_id="a", pool=lease.state.pool, launched_at=at)
        lease.write(replace(lease.state, status=status, nodes=(kept,)))
    with pytest.raises(UsageError, match=f"{stands}, and its machines are not known to have ended") as refused:
        checkpoints("made", Asked(prune=True), as_json=True)
    assert refused.value.hint == f"gpucloud down made ends {ends}; then the same command again"


def test_pull_and_export_say_where_and_how_much(jobs, capsys, tmp_path):
    code, found = answer(capsys, pull=Path("here"), step=20)
    assert (code, found["step"], found["resumes_from"]) == (0, 20, 20)
    assert found["bytes"] == found["fetched_bytes"] > 0
    code, found = answer(capsys, export=Path("w.safetensors"))
    assert (code, found["step"], found["tensors"]) == (0, 40, 3)
    assert found["bytes"] == (tmp_path / "w.safetensors").stat().st_size
    (tmp_path / "out").mkdir()
    assert answer(capsys, export=Path("out"))[1]["file"] == str(tmp_path / "out" / "model.safetensors")


def test_the_best_by_the_scripts_metric_is_listed_kept_and_brought(jobs, capsys, tmp_path):
    with pytest.raises(UsageError, match="no checkpoint was called the best"):
        checkpoints("made", Asked(pull=Path("here"), best=True), as_json=True)
    jobs.store.put(f"{jobs.checkpoints}/{best_key(Commit(1, 10))}", best_bytes(0.93))
    listed = answer(capsys)[1]["checkpoints"]
    assert [(one["step"], one["metric"], one["marks"]) for one in listed if one["step"] in (10, 20)] == [
        (20, None, ["kept"]),
        (10, 0.93, ["best", "kept"]),
    ]
    checkpoints("made", Asked(), as_json=False)
    assert capsys.readouterr().out.splitlines()[4].endswith("exact  due   best (0.93), kept")
    assert answer(capsys, prune=True, yes=True)[1]["checkpoints"] == []
    assert answer(capsys, pull=Path("here"), best=True)[1]["step"] == 10
    assert answer(capsys, export=Path("w.safetensors"), best=True)[1]["step"] == 10
    with pytest.raises(UsageError, match="--best says nothing alone"):
        checkpoints("made", Asked(best=True), as_json=True)
    with pytest.raises(UsageError, match="--best and --step are two checkpoints"):
        checkpoints("made", Asked(pull=Path("here"), best=True, step=10), as_json=True)


@pytest.mark.parametrize("asked", [{"verify": True}, {"pull": Path("here")}, {"export": Path("w.safetensors")}])
def test_ctrl_c_is_one_line_and_code_130_and_leaves_nothing_that_can_be_seen(
    jobs, capsys, tmp_path, monkeypatch, asked
):
    def pressed(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpucloud.store.directory.DirectoryStore.read_into", pressed)
    assert checkpoints("made", Asked(**asked), as_json=False) == 130
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n"), said.err[:9]) == ("", 1, "stopped: ")
    assert not (tmp_path / "w.safetensors").exists()
    assert not list(tmp_path.glob("here/commit/*/*"))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"verify": True, "prune": True}, "--verify and --prune are two things"),
        ({"step": 3}, "--step says nothing alone"),
        ({"everything": True}, "--with-state says nothing alone"),
        ({"yes": True}, "--yes says nothing alone"),
        ({"verify": True, "step": 33}, "no checkpoint of step 33: the nearest is 30"),
    ],
)
def test_what_makes_no_sense_is_refused(jobs, asked, says):
    with pytest.raises(UsageError, match=says):
        checkpoints("made", Asked(**asked), as_json=False)


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        (
            CheckpointPolicy(),
            "a script with gpucloud.resume saves first within seconds of its start, once a step is done;",
        ),
        (
            CheckpointPolicy(every=timedelta(hours=1)),
            "a script with gpucloud.resume saves first 1 h after its script's",
        ),
        (CheckpointPolicy(every_steps=500), "a script with gpucloud.resume saves first at step 500;"),
        (
            CheckpointPolicy(directory=CheckpointDirectory(path="ckpt")),
            "the first is there once its script has a whole checkpoint in ckpt\n",
        ),
        (CheckpointPolicy(none=True), "its job file says `checkpoint: none`: its script saves nothing\n"),
    ],
)
def test_a_job_without_checkpoints_says_what_makes_its_first(jobs, capsys, policy, hint):
    for key in jobs.store.list(jobs.checkpoints):
        jobs.store.delete(key)
    orders = Orders(jobs=jobs, clock=SystemClock())
    orders.change(lambda order: replace(order, resolved=replace(order.resolved, checkpoint=policy)))
    assert checkpoints("made", Asked(), as_json=False) == 0
    assert f"hint: {hint}" in capsys.readouterr().err


def test_a_job_without_checkpoints_says_so(jobs, capsys):
    for key in jobs.store.list(jobs.checkpoints):
        jobs.store.delete(key)
    assert checkpoints("made", Asked(), as_json=False) == 0
    assert capsys.readouterr().out == "made has no checkpoints yet\n"
    with pytest.raises(UsageError, match="has no checkpoints yet"):
        checkpoints("made", Asked(verify=True), as_json=False)


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        (CheckpointPolicy(every_steps=500), "a script saves with gpucloud.resume, or into the job file's "),
        (CheckpointPolicy(directory=CheckpointDirectory(path="ckpt")), "its script had no whole checkpoint in ckpt\n"),
        (CheckpointPolicy(none=True), "its job file says `checkpoint: none`: its script saves nothing\n"),
    ],
)
def test_of_a_job_that_has_ended_without_a_checkpoint_none_is_announced(jobs, capsys, monkeypatch, policy, hint):
    for key in jobs.store.list(jobs.checkpoints):
        jobs.store.delete(key)
    orders = Orders(jobs=jobs, clock=SystemClock())
    orders.change(lambda order: replace(order, resolved=replace(order.resolved, checkpoint=policy)))
    with take(jobs, SystemClock()) as lease:
        lease.write(replace(lease.state, status=JobStatus.FAILED))
    load, loaded = JobStore.load, []
    monkeypatch.setattr(JobStore, "load", lambda self: loaded.append(self.job) or load(self))
    assert checkpoints("made", Asked(), as_json=False) == 0
    told = capsys.readouterr()
    assert len(loaded) == 1
    assert told.out == "made has ended, and has no checkpoints\n"
    assert f"hint: {hint}" in told.err
