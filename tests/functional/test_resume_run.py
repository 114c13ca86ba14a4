"""One process: what a run writes, restores, refuses and survives."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from botocore.exceptions import ClientError

from gpucloud import resume
from gpucloud.agent.attempt.files import AttemptFolder
from gpucloud.domain.checkpoint.manifest import Commit, commit_key, manifest_bytes, seal, unseal
from gpucloud.domain.checkpoint.objects import blank, read_header, sums_of
from gpucloud.domain.errors import CheckpointUnreadable, StoreError, UsageError
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.resume import ranks, reading
from gpucloud.resume.folder import Beside
from gpucloud.resume.save import capture, writer
from gpucloud.resume.save.cadence import Cadence, Moment, is_better_anew, is_due, read_cadence
from gpucloud.resume.save.writer import Plan, SaveBuffer
from gpucloud.resume.state.tree import decode, encode, tensor_at
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.store.writing import lasts
from tests.functional.resuming import DATA, begin, job, train
from tests.standins import in_writers
from tests.unit.test_reconcile import GOAL, RULES, running
from tests.unit.worlds import part, up

__all__ = ["job"]  # a fixture


def committed(job):
    return sorted(int(path.stem) for path in (job / "store").glob("jobs/x/checkpoints/commit/*/*.json"))


def reasons(job):
    """What each checkpoint was saved for, by its step."""
    checkpoints = Checkpoints(open_store(str(job / "store")), "jobs/x/checkpoints", keep=3)
    return {manifest.commit.step: manifest.why.value for manifest in checkpoints.candidates()}


def report(job, name="progress.json"):
    return json.loads((job / "attempt" / name).read_text())


def test_a_run_continues_where_the_newest_commit_is(job):
    run, model, optimizer = begin(total_steps=9)
    whole = train(run, model, optimizer)
    run.done()
    for path in sorted((job / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    first = train(*begin(), steps=7)  # the commit of step 6 is the newest
    run, model, optimizer = begin(total_steps=9)
    assert run.steps_done == 6
    assert first[:6] + train(run, model, optimizer) == whole


def test_a_checkpoint_of_a_longer_run_is_refused_instead_of_being_done_at_once(job):
    train(*begin(total_steps=9), steps=7)
    with pytest.raises(UsageError, match="of step 6, and this run has 5 steps: it is over already"):
        begin(total_steps=5)
    run, *_ = begin(total_steps=6)
    assert run.steps_done == 6


def test_a_wish_for_an_early_save_is_granted_once_at_the_next_step_and_training_goes_on(job, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_EVERY", "steps:1000")
    run, model, optimizer = begin(total_steps=9)
    wish = job / "attempt" / "save.json"
    for (batch,) in run.loader(DATA, global_batch=4):
        if run.steps_done in (3, 5):
            wish.write_text('{"since": 1795176000.25}')
        if run.steps_done == 6:
            wish.write_text("torn")
        model(batch).square().sum().backward()
        optimizer.step()
        run.step()
        if run.steps_done == 9:
            break
    run._decider._finish()
    assert committed(job) == [run.committed_step] == [4]
    run.done()
    assert reasons(job) == {4: "notice", 9: "last"}


def test_the_longest_save_is_told_to_the_node_that_must_ask_for_the_last_one_in_time(job):
    run, model, optimizer = begin(total_steps=5)
    assert not (job / "attempt" / "saving.json").exists()
    train(run, model, optimizer)
    run.done()

    told = report(job, "saving.json")
    assert 0 < told["seconds"] < 30
    assert 0 < told["step"] < 5


def test_progress_tells_the_steps_the_phase_and_what_counts(job):
    run, model, optimizer = begin(total_steps=5)
    assert report(job)["phase"] == "start"
    assert (report(job)["step"], report(job)["first_step"], report(job)["committed_step"]) == (0, 1, None)
    losses = train(run, model, optimizer)
    with run.phase("evaluate"):
        assert report(job)["phase"] == "evaluate"
    run.done()
    last = report(job)
    assert set(last) == {
        "step", "first_step", "total_steps", "loss", "phase", "committed_step", "step_seconds", "waiting_share",
        "longest_s", "unsaved", "written_at",
    }  # fmt: skip
    assert (last["step"], last["total_steps"], last["committed_step"], last["phase"]) == (5, 5, 5, "done")
    assert last["loss"] == losses[-1]
    assert 0 < last["step_seconds"] < 5
    assert report(job, "done-0.json")["step"] == 5


class Disk:
    """A folder whose disk writes when it may, and remembers what it wrote."""

    path = Path("/somewhere")

    def __init__(self):
        self.written, self.asked, self.may = [], threading.Event(), threading.Event()

    def tell(self, name, content):
        self.asked.set()
        assert self.may.wait(20)
        self.written.append((name, content["step"]))
        self.asked.clear()


def test_a_slow_disk_keeps_no_step_waiting_and_never_says_less_at_the_end():
    disk = Disk()
    beside = Beside(disk, "progress.json")
    beside.offer({"step": 1})
    assert disk.asked.wait(20)  # by another thread
    for step in (2, 3, 4):
        beside.offer({"step": step})
    assert not disk.written
    disk.may.set()
    beside.write({"step": 5})
    assert disk.written[0] == ("progress.json", 1)
    assert disk.written[-1] == ("progress.json", 5)
    assert disk.written == sorted(disk.written)
    thread = beside._thread
    beside.close()
    thread.join(20)
    assert not thread.is_alive()


def test_where_no_thread_is_to_be_had_what_is_offered_is_written_at_once(monkeypatch):
    disk = Disk()
    disk.may.set()

    def none(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    Beside(disk, "progress.json").offer({"step": 7})
    assert disk.written == [("progress.json", 7)]


def gather(run, model, optimizer, steps=None):
    """Train so that the weights change after every third step alone, and return the losses."""
    losses = []
    for number, (batch,) in enumerate(run.loader(DATA, global_batch=4), 1):
        loss = model(batch).square().sum()
        loss.backward()
        losses.append(loss.item())
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        run.step(loss=loss)
        run._decider._finish()
        if run.steps_done == steps:
            break
    return losses


def test_where_gradients_are_gathered_saving_and_leaving_wait_until_they_are_used(job):
    first = gather(*begin(total_steps=20), steps=10)
    assert committed(job) == [3, 6, 9]  # due were 2, 4, 6 and 8
    run, model, optimizer = begin(total_steps=20)
    assert run.steps_done == 9
    again = gather(run, model, optimizer, steps=13)
    assert first[9:] == again[:1]
    (job / "attempt" / "stop.json").write_text('{"reason": "budget", "at": null}')
    model(DATA.tensors[0][:4]).sum().backward()
    run.step()
    optimizer.step()
    with pytest.raises(SystemExit):
        run.step()
    assert committed(job)[-1] == 15


def levels(job):
    stored_checkpoints = Checkpoints(open_store(str(job / "store")), "jobs/x/checkpoints", keep=3)
    return {manifest.commit.step: manifest.promise.level.value for manifest in stored_checkpoints.candidates()}


@pytest.mark.parametrize("attempts", [1, 2])
def test_an_optimizer_that_is_seen_no_more_keeps_a_notice_waiting_for_a_few_windows_alone(job, capfd, attempts):
    run, model, optimizer = begin(total_steps=200)
    for seen in (True,) * 3 + (False,) * 3:  # as of a CUDA graph: it is warmed up eagerly, and then replayed
        model(DATA.tensors[0][:4]).sum().backward()
        if seen:
            optimizer.step()
        run.step()
    if attempts == 2:
        run._decider.settle()
        run, model, optimizer = begin(total_steps=200)
        model(DATA.tensors[0][:4]).sum().backward()
    (job / "attempt" / "stop.json").write_text('{"reason": "notice", "at": null}')
    last = run.steps_done
    with pytest.raises(SystemExit):
        any(run.step() for _ in range(6))
    assert run.steps_done <= last + 5
    assert levels(job)[run.steps_done] == "best_effort"
    assert "is saved as best_effort: gradients may be gathered that no checkpoint has" in capfd.readouterr().err


def test_an_optimizer_that_is_never_seen_to_step_keeps_nothing_from_being_saved_for_long_and_leaving_not_at_all(job):
    run, model, _ = begin(total_steps=200)
    model(DATA.tensors[0][:4]).sum().backward()
    for _ in range(65):
        run.step()
        run._decider._finish()
    assert committed(job) == [65]
    run, model, _ = begin(total_steps=200)
    model(DATA.tensors[0][:4]).sum().backward()
    (job / "attempt" / "stop.json").write_text('{"reason": "budget", "at": null}')
    with pytest.raises(SystemExit):
        run.step()
    assert committed(job) == [65, 66]


def test_a_run_that_is_asked_to_stop_saves_that_step_and_exits_with_75(job):
    run, model, optimizer = begin(total_steps=9)
    train(run, model, optimizer, steps=3)
    optimizer.zero_grad()
    (job / "attempt" / "stop.json").write_text('{"reason": "budget", "at": null}')
    with pytest.raises(SystemExit) as left:
        run.step()
    assert left.value.code == 75
    assert reasons(job) == {2: "due", 4: "budget"}
    assert report(job, "left-0.json") == {"rank": 0, "step": 4, "committed_step": 4}
    assert not (job / "attempt" / "done-0.json").exists()


REFUSE = """
from gpucloud.domain.errors import StoreError
from gpucloud.store.directory import DirectoryStore
write, put = DirectoryStore.write, DirectoryStore.put

def refused(method):
    def call(self, key, *data, **condition):
        if {where!r} in key:
            raise StoreError("no space left", hint="free some") from OSError({number}, "as the disk says it")
        return method(self, key, *data, **condition)
    return call

DirectoryStore.write, DirectoryStore.put = refused(write), refused(put)
"""


def in_the_writer(job, monkeypatch, code):
    monkeypatch.setenv("PYTHONPATH", in_writers.place(job / "first", code))


@pytest.mark.parametrize(("where", "kept"), [("data/000001/000000004", [2, 6]), ("commit/000001/000000004", [2, 6])])
def test_a_save_that_fails_is_dropped_and_training_goes_on(job, monkeypatch, capsys, where, kept):
    in_the_writer(job, monkeypatch, REFUSE.format(where=where, number=errno.ENOSPC))
    run, model, optimizer = begin(total_steps=6)
    train(run, model, optimizer)
    run.done()
    assert committed(job) == kept
    assert "could not save step 4: no space left (free some)" in capsys.readouterr().err


def supervised(job):
    """What the agent makes of the attempt once its script is over, and the supervisor of that."""
    (job / "0001").symlink_to("attempt")
    outcome = AttemptFolder(job, 1).outcome((0,), 1, killed=False)
    world = running(up("a", part(1, outcome)), up("b", part(1, outcome)), failed_for=timedelta(hours=1))
    return outcome, decide(GOAL, world, RULES).reason


@pytest.mark.parametrize(
    ("number", "becomes"),
    [
        (errno.EIO, (Outcome.BARRED, ExitReason.LOST)),  # no fault of the script's: another attempt goes on
        (errno.ENOLCK, (Outcome.BARRED, ExitReason.LOST)),
        (errno.ENOSPC, (Outcome.FAILED, ExitReason.USER_ERROR)),  # another would be refused as well
    ],
)
def test_a_job_is_not_done_while_its_final_state_cannot_be_saved(job, monkeypatch, number, becomes):
    in_the_writer(job, monkeypatch, REFUSE.format(where="000000003", number=number))
    run, model, optimizer = begin(total_steps=3)
    train(run, model, optimizer)
    with pytest.raises(StoreError, match="step 3") as refused:
        run.done()
    assert ("mend what" in refused.value.hint) is (number == errno.ENOSPC)
    assert not (job / "attempt" / "done-0.json").exists()
    assert supervised(job) == becomes
    told = json.loads((job / "attempt/progress.json").read_text())
    assert (told["phase"] != "done", told["unsaved"]) == (True, "no space left (free some)")


def test_what_a_store_answers_once_may_be_answered_otherwise_later_but_for_a_missing_right_or_bucket():
    def told(code, status=400):
        error = StoreError("refused")
        said = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        error.__cause__ = ClientError(said, "PutObject")
        return lasts(error)

    lasting = (
        "AccessDenied", "NoSuchBucket", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
        "KMS.DisabledException", "KMS.NotFoundException", "KMS.KMSInvalidStateException", "EntityTooLarge",
    )  # fmt: skip
    passing = ("TooManyRequests", "429", "BadDigest", "RequestTimeTooSkewed", "SlowDown", "KMS.ThrottlingException")
    assert [code for code in (*lasting, *passing) if told(code)] == list(lasting)
    assert told("507", 507)  # a full server, whatever it calls that
    assert not told("503", 503)
    assert not lasts(StoreError("for whatever else"))


def test_a_run_that_was_replaced_stops(job, monkeypatch):
    old, model, optimizer = begin()
    train(old, model, optimizer, steps=2)
    monkeypatch.setenv("GPUCLOUD_ATTEMPT", "2")
    new, *_ = begin()
    assert new.steps_done == 2
    old.step()
    old.step()  # copied; that it cannot count is known at a later step
    with pytest.raises(resume.Fenced, match="another attempt"):
        old.done()
    assert committed(job) == [2]


def test_a_second_init_in_one_attempt_is_told_apart_from_another_attempt(job):
    old, *_ = begin()
    new, *_ = begin()
    with pytest.raises(UsageError, match=r"resume\.init was called again in this process") as refused:
        old.step()
    assert "call it once" in refused.value.hint
    new.step()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_is_lost_costs_the_save_it_was_at_and_another_takes_its_place(job, monkeypatch, capsys, how):
    # Only the first writer dies: of the second save, when the object is written and the manifest is not.
    in_the_writer(
        job,
        monkeypatch,
        f"""
import os, pathlib
from gpucloud.store.directory import DirectoryStore
put, once = DirectoryStore.put, pathlib.Path({str(job / "once")!r})

def struck(self, key, *data, **condition):
    if "commit/000001/000000004" in key and not once.exists():
        once.touch()
        os.kill(os.getpid(), {int(how)})
    return put(self, key, *data, **condition)

DirectoryStore.put = struck
""",
    )
    run, model, optimizer = begin(total_steps=8)
    train(run, model, optimizer)
    run.done()
    assert committed(job) == [2, 6, 8]
    assert capsys.readouterr().err.count("could not save step 4: the process that writes checkpoints is lost") == 1


def test_a_save_under_way_when_a_stop_is_asked_counts_too_if_it_is_of_an_earlier_step(job, monkeypatch):
    in_the_writer(job, monkeypatch, held(job))
    run, *_ = begin(total_steps=9)
    run.step()
    run.step()
    assert run.committed_step == 0
    (job / "attempt" / "stop.json").write_text('{"reason": "budget", "at": null}')
    (job / "go").touch()
    with pytest.raises(SystemExit):
        run.step()
    assert committed(job) == [2, 3]


SLOW = """
import time
from gpucloud.store.directory import DirectoryStore
write = DirectoryStore.write

def slow(self, key, pieces):
    time.sleep(0.5)
    return write(self, key, pieces)

DirectoryStore.write = slow
"""


def held(job):
    """What makes writers wait until the file `go` is there."""
    return f"""
import pathlib, time
from gpucloud.store.directory import DirectoryStore
write = DirectoryStore.write

def held(self, key, pieces):
    while not pathlib.Path({str(job / "go")!r}).exists():
        time.sleep(0.01)
    return write(self, key, pieces)

DirectoryStore.write = held
"""


@pytest.mark.parametrize(("left_s", "kept"), [(60, [2]), (1, [])])
def test_a_save_under_way_is_waited_for_as_long_as_the_notice_allows(job, monkeypatch, left_s, kept, capsys):
    in_the_writer(job, monkeypatch, held(job))
    run, *_ = begin(total_steps=9)
    run.step()
    if kept:
        (job / "go").touch()
    at = datetime.now(timezone.utc) + timedelta(seconds=left_s)
    (job / "attempt" / "stop.json").write_text(json.dumps({"reason": "notice", "at": at.isoformat()}))
    with pytest.raises(SystemExit) as left:
        run.step()
    assert left.value.code == 75
    assert committed(job) == kept
    assert report(job, "left-0.json")["committed_step"] == max(kept, default=0)
    assert ("could not be saved" in capsys.readouterr().err) == (kept == [])


DIES_ONCE_COMMITTED = """
import os
from gpucloud.store.directory import DirectoryStore
put = DirectoryStore.put

def dying(self, key, data, **condition):
    done = put(self, key, data, **condition)
    if "commit/" in key and key.endswith("000000006.json"):
        os._exit(1)
    return done

DirectoryStore.put = dying
"""


def test_a_commit_of_a_writer_that_died_before_it_said_so_counts_and_is_not_made_again(job, monkeypatch, capsys):
    in_the_writer(job, monkeypatch, DIES_ONCE_COMMITTED)
    run, model, optimizer = begin(total_steps=6)
    train(run, model, optimizer)
    assert run.committed_step == 6
    run.done()
    assert reasons(job)[6] == "due"
    assert "could not save" not in capsys.readouterr().err


STUCK = """
import time
from gpucloud.store.directory import DirectoryStore
write = DirectoryStore.write

def stuck(self, key, pieces):
    while "000000002" in key:
        time.sleep(0.01)
    return write(self, key, pieces)

DirectoryStore.write = stuck
"""


def test_a_save_under_way_is_given_up_where_a_notice_leaves_time_for_one_but_not_for_two(job, monkeypatch, capsys):
    in_the_writer(job, monkeypatch, STUCK)
    run, *_ = begin(total_steps=9)
    run.step()
    run.step()
    run._decider._saver._upload_s = 40.0  # what the one before took
    at = datetime.now(timezone.utc) + timedelta(seconds=60)
    (job / "attempt" / "stop.json").write_text(json.dumps({"reason": "notice", "at": at.isoformat()}))
    with pytest.raises(SystemExit):
        run.step()
    assert committed(job) == [3]
    assert "the save under way is given up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("save_s", "gone_s", "left_s", "anew"),
    [
        (81, 2, 117, True),  # 79 s more and another 81 are too much, 81 alone are not
        (81, 70, 117, False),  # both have time
        (30, 1, 117, False),
        (100, 2, 117, False),  # it might not be done in time: better the one that will
        (0, 2, 117, False),  # nobody knows what a save takes
        (81, 90, 117, False),  # late, it may be done at any moment
    ],
)
def test_what_becomes_of_a_save_under_way_follows_from_what_saves_take(save_s, gone_s, left_s, anew):
    assert is_better_anew(save_s=save_s, gone_s=gone_s, left_s=left_s) is anew


def test_a_number_of_steps_is_kept_although_training_waits_and_that_is_said_once(job, monkeypatch, capsys):
    in_the_writer(job, monkeypatch, SLOW)
    run, model, optimizer = begin(total_steps=6)
    train(run, model, optimizer)
    assert committed(job) == [2, 4, 6]
    assert capsys.readouterr().err.count("training waits for it") == 1


def test_a_number_of_seconds_never_makes_training_wait(job, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_EVERY", "0.001")
    in_the_writer(job, monkeypatch, held(job))
    run, *_ = begin(total_steps=6)
    for _ in range(5):
        time.sleep(0.002)  # the first save is due at the first step
        run.step()
    assert run.committed_step == 0
    (job / "go").touch()
    run._decider._finish()
    assert committed(job) == [run.committed_step] == [1]
    run.step()
    run.done()
    assert committed(job)[-1] == 6


def test_places_in_memory_are_planned_once_and_anew_when_the_state_grows(job):
    class Growing:
        size = 1000

        def state_dict(self):
            return {"x": torch.full((self.size,), float(self.size))}

        def load_state_dict(self, state):
            self.size = len(state["x"])
            assert state["x"].tolist() == [float(self.size)] * self.size

    part = Growing()
    run, *_ = begin(total_steps=9, part=part)
    plans, sizes = [], []
    for step in range(1, 9):
        if step == 7:
            part.size = 2_000_000
        run.step()
        run._decider._finish()
        plans.append(run._decider._saver._capture._plan)
        sizes.append(run._decider._saver._capture.save_buffer.size)
    assert len({id(plan) for plan in plans[1:6]}) == 1
    assert plans[7] is not plans[5]
    assert sizes[7] > 8_000_000 > sizes[5]
    assert begin(part=part)[0].steps_done == 8


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("kind", ["data", "commit"])
def test_a_damaged_checkpoint_is_passed_over(job, damage, kind, capsys):
    train(*begin(), steps=4)
    (newest,) = (job / "store").glob(f"jobs/x/checkpoints/{kind}/**/000000004*" + ("/*" if kind == "data" else ""))
    data = newest.read_bytes()
    if damage == "flip":
        newest.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    elif damage == "cut":
        newest.write_bytes(data[:-1])
    else:
        newest.unlink()
    assert begin()[0].steps_done == 2
    told = "the checkpoint of step 4 is damaged" in capsys.readouterr().err
    assert told == ((kind, damage) != ("commit", "remove"))  # what leaves no trace cannot be told of


def there(job):
    """All that lies in the store of what was saved, without who looked at it since."""
    store = job / "store" / "jobs/x/checkpoints"
    return {path: path.read_bytes() for kind in ("commit", "data") for path in (store / kind).rglob("*.*")}


def test_no_run_begins_at_step_0_over_checkpoints_that_are_all_damaged(job):
    train(*begin(), steps=4)
    for path in (job / "store").glob("jobs/x/checkpoints/data/**/*.safetensors"):
        path.write_bytes(b"rotten")
    before = there(job)
    with pytest.raises(UsageError, match="none of the 2 checkpoints that are there can be used"):
        begin()
    assert there(job) == before
    assert not list((job / "attempt").glob("barred-*"))


def of_another_format(job):
    for path in (job / "store").glob("jobs/x/checkpoints/commit/*/*.json"):
        path.write_bytes(seal({**unseal(path.read_bytes()), "format": 9}))


def of_an_unknown_type(job):
    """Bytes as their manifests say, with tensors that torch gained later."""
    stored_checkpoints = Checkpoints(open_store(str(job / "store")), "jobs/x/checkpoints", keep=3)
    for manifest in list(stored_checkpoints.candidates()):
        path = job / "store/jobs/x/checkpoints" / manifest.pieces[0].key
        data = path.read_bytes().replace(b'"F32"', b'"F4X"')
        path.write_bytes(data)
        changed = replace(manifest, pieces=(replace(manifest.pieces[0], crc32=sums_of((memoryview(data),)).crc32),))
        (job / "store/jobs/x/checkpoints" / commit_key(manifest.commit)).write_bytes(manifest_bytes(changed))


@pytest.mark.parametrize(("change", "why"), [(of_another_format, "format"), (of_an_unknown_type, "unknown type 'F4X'")])
def test_what_a_newer_gpucloud_saved_is_no_damage_and_nothing_begins_without_it(job, change, why):
    train(*begin(), steps=4)
    change(job)
    before = there(job)
    with pytest.raises(CheckpointUnreadable, match=why):
        begin()
    assert there(job) == before
    assert why.split()[0] in report(job, "barred-0.json")["why"]


def test_where_no_thread_can_be_started_nothing_counts_as_damaged(job, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    train(*begin(), steps=4)
    before = there(job)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StoreError, match="can't start new thread"):
        begin()
    monkeypatch.undo()
    assert (there(job), (job / "attempt/barred-0.json").exists()) == (before, True)


def test_where_there_is_no_memory_for_it_nothing_counts_as_damaged(job, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    train(*begin(), steps=4)
    monkeypatch.setattr(reading.mmap, "mmap", refuse)
    with pytest.raises(CheckpointUnreadable, match="there is no memory for the"):
        begin()


def left_free(monkeypatch, size):
    """Have the machine say that so many bytes are free."""
    for module in (ranks, capture):
        monkeypatch.setattr(module, "free_memory", lambda: {"on the machine:x": size})


def test_where_too_little_memory_is_free_no_checkpoint_is_read_and_none_counts_as_damaged(job, monkeypatch):
    train(*begin(), steps=4)
    before = there(job)
    left_free(monkeypatch, 1000)
    with pytest.raises(CheckpointUnreadable, match=r"no memory to read .* of step 4: .* wanted, 1000 B free on the m"):
        begin()
    assert (there(job), (job / "attempt/barred-0.json").exists()) == (before, True)


def test_where_too_little_memory_is_free_nothing_is_saved_and_training_goes_on_and_says_so_once(
    job, monkeypatch, capsys
):
    left_free(monkeypatch, 1000)
    run, model, optimizer = begin(total_steps=6)
    train(run, model, optimizer)
    said = capsys.readouterr().err
    assert (run.steps_done, committed(job), said.count("KiB wanted, 1000 B free on the machine")) == (6, [], 1)
    assert "nothing can be saved" in said
    assert "and in the end all but what the script has exported" in said
    run.done()
    ended = capsys.readouterr().err
    assert (
        "the run is trained, and its state of step 6 is not saved, as nothing of it could be: there is no mem" in ended
    )
    assert (committed(job), (job / "attempt/done-0.json").exists()) == ([], True)
    assert not (job / "attempt/barred-0.json").exists()


def test_a_run_without_memory_for_its_last_save_after_others_is_trained_and_not_trained_again(job, monkeypatch, capsys):
    train(*begin(), steps=2)
    run, model, optimizer = begin(total_steps=6)
    left_free(monkeypatch, 1000)
    train(run, model, optimizer)
    run.done()
    ended = capsys.readouterr().err
    assert "the run is trained, and its state of step 6 is not saved: there is no memory for it: " in ended
    assert "; beside the newest checkpoint, of step 2, what the script has exported or written into `outputs:`" in ended
    assert committed(job) == [2]
    told = json.loads((job / "attempt/progress.json").read_text())
    assert (told["step"], told["committed_step"], told["phase"]) == (6, 2, "done")
    assert told["unsaved"].startswith("there is no memory for it: ")
    assert supervised(job) == (Outcome.DONE, ExitReason.SUCCEEDED)


def test_a_run_that_must_leave_and_has_no_memory_to_save_leaves_all_the_same(job, monkeypatch, capsys):
    left_free(monkeypatch, 1000)
    run, model, optimizer = begin()
    (job / "attempt/stop.json").write_text(json.dumps({"reason": "notice", "at": "2100-01-01T00:00:00+00:00"}))
    with pytest.raises(SystemExit, match="75"):
        train(run, model, optimizer)
    unsaved, left = capsys.readouterr().err.splitlines()[-2:]
    assert unsaved.startswith("gpucloud: step 1 could not be saved, there is no memory for it: ")
    assert unsaved.endswith(": the job begins again, as nothing is saved")
    assert left == "gpucloud: asked to stop (notice): leaving"


def test_a_state_that_grows_beyond_the_free_memory_is_saved_again_when_there_is_enough(job, monkeypatch, capsys):
    run = resume.init(model=(model := torch.nn.Linear(2, 2)), total_steps=20)

    def steps(count):
        for _ in range(count):
            run.step()
        run._decider._finish()

    steps(2)
    left_free(monkeypatch, 2**20)
    model.register_buffer("cache", torch.zeros(2**20))
    steps(4)
    assert committed(job) == [2]
    assert "nothing can be saved, there is no memory for it: 3" in capsys.readouterr().err
    left_free(monkeypatch, 2**30)
    steps(2)
    assert committed(job) == [2, 8]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOMEM, "no memory")])
def test_memory_that_runs_out_as_a_save_begins_costs_that_save_alone(job, monkeypatch, capsys, error):
    def refuse(*_, **__):
        raise error

    run, model, optimizer = begin(total_steps=6)
    with monkeypatch.context() as patched:
        if isinstance(error, OSError):
            patched.setattr(writer.mmap, "mmap", refuse)
        else:
            patched.setattr(run._decider._saver._capture._copier, "copy", refuse)
        train(run, model, optimizer)
    assert (run.steps_done, committed(job)) == (6, [])
    assert capsys.readouterr().err.count("nothing can be saved") == 1
    run.done()
    assert committed(job) == [6]


def test_two_whole_checkpoints_and_the_base_are_kept(job, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_KEEP", "1")
    for last, kept in ((8, [6, 8]), (14, [8, 12, 14])):
        run, model, optimizer = begin()
        train(run, model, optimizer, steps=last)
        run.done()  # which waits until older ones are deleted
        assert committed(job) == kept


def test_a_checkpoint_of_another_model_is_refused_with_its_step(job):
    train(*begin(), steps=2)
    with pytest.raises(UsageError, match="step 2 does not fit this script") as refused:
        begin(width=5)
    assert "new run" in refused.value.hint


def test_an_optimizer_of_other_modules_than_the_runs_is_told_of(job):
    run, model, optimizer = begin()
    model[0] = torch.nn.Linear(2, 3)
    train(run, model, optimizer, steps=2)
    with pytest.raises(UsageError, match=r"had parameters that are in no module which resume\.init was given"):
        begin()


@pytest.mark.parametrize("from_the_first", [False, True])
def test_who_unfreezes_later_hears_to_give_the_optimizer_all_groups_at_first(job, from_the_first):
    """Gradual unfreezing: the second layer is trained from step 3 on."""

    def attempt(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        head, rest = ({"params": list(part.parameters())} for part in model)
        for parameter in rest["params"]:
            parameter.requires_grad_(False)
        optimizer = torch.optim.AdamW([head, rest] if from_the_first else [head])
        run = resume.init(model=model, optimizer=optimizer, total_steps=8)
        losses = []
        for (batch,) in run.loader(DATA, global_batch=4):
            if run.steps_done >= 3 and not rest["params"][0].requires_grad:
                for parameter in rest["params"]:
                    parameter.requires_grad_(True)
                if not from_the_first:
                    optimizer.add_param_group(rest)
            loss = model(batch).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.step(loss=loss)
            if run.steps_done == steps:
                break
        run.done() if run.steps_done == 8 else run._decider._finish()
        return losses

    if from_the_first:
        whole = attempt(8)
        for path in sorted((job / "store").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        assert attempt(6) + attempt(8) == whole
    else:
        attempt(6)
        with pytest.raises(
            UsageError, match=r"step 6 does not fit .* another group later, of model.1.weight"
        ) as refused:
            attempt(8)
        assert "requires_grad=False" in refused.value.hint


def test_what_has_no_state_is_refused_by_name(job):
    with pytest.raises(UsageError, match=r"init\(metric=…\) was given a list"):
        begin(metric=[])


def test_a_state_that_json_cannot_hold_is_refused_by_its_place(job):
    class Strange:
        def state_dict(self):
            return {"a": [object()]}

        def load_state_dict(self, state):
            raise AssertionError

    run, *_ = begin(strange=Strange())
    with pytest.raises(UsageError, match=r"cannot save rank\.others\.strange\.a\.0: a object"):
        run.step()


def test_one_of_several_ranks_without_a_process_group_is_told_what_to_call(job, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="no process group") as refused:
        begin()
    assert "init_process_group" in refused.value.hint


def test_outside_gpucloud_checkpoints_lie_in_the_working_folder(tmp_path, monkeypatch):
    for name in ("STORE", "CHECKPOINTS", "ATTEMPT", "ATTEMPT_DIR", "CHECKPOINT_EVERY", "CHECKPOINT_KEEP"):
        monkeypatch.delenv(f"GPUCLOUD_{name}", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    run, model, optimizer = begin(total_steps=2)
    (tmp_path / "hydra").mkdir()
    monkeypatch.chdir(tmp_path / "hydra")  # as Hydra does
    run._decider._saver._dispatch._writer.kill()  # another comes in its place
    train(run, model, optimizer)
    run.done()
    assert (tmp_path / ".gpucloud-checkpoints" / "commit" / "000001" / "000000002.json").exists()
    monkeypatch.chdir(tmp_path)
    assert begin(total_steps=2)[0].steps_done == 2


# Whatever is around the training


def test_more_open_files_than_select_can_count_keep_nothing_from_being_saved(job):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [Path(os.devnull).open("rb") for _ in range(1100)]  # noqa: SIM115
    try:
        run, model, optimizer = begin(total_steps=3)
        train(run, model, optimizer)
        run.done()
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert committed(job) == [2, 3]


def test_a_full_disk_in_the_attempts_folder_ends_no_training(job, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = Path.write_text

    def write_text(self, data, *args, **options):
        if "progress" in self.name or "saving" in self.name:
            raise full
        return written(self, data, *args, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    run, model, optimizer = begin(total_steps=3)
    train(run, model, optimizer)
    run.done()
    assert committed(job) == [2, 3]


@pytest.mark.parametrize("name", ["queue", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pathlib", "typing"))])
def test_modules_with_the_names_of_the_standard_library_keep_nothing_from_being_saved(job, tmp_path, name):
    """Old backports lie beside installed packages, and a script's own folder may have a `queue.py`."""
    site, own = tmp_path / "site", tmp_path / "own"
    for folder in (site, own):
        folder.mkdir()
        (folder / f"{name}.py").write_text("raise ImportError('not the one')\n")
    (own / "train.py").write_text(
        f"import sys\nown = sys.path.pop(0)\nimport {name}, torch\n"
        "from gpucloud import resume\n"
        f"sys.path.insert(0, own); sys.path.append({str(site)!r})\n"
        "run = resume.init(model=torch.nn.Linear(2, 2), total_steps=2)\n"
        "run.step(); run.step(); run.done()\n"
    )
    done = subprocess.run([sys.executable, own / "train.py"], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, committed(job)) == (0, [2]), done.stderr


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def test_tensors_of_every_kind_come_back_bit_for_bit():
    tensors = {str(dtype): torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5), "strided": torch.arange(12).reshape(3, 4).T}
    tensors["nan"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    writer = SaveBuffer()
    plan = Plan(tensors, writer, header=0)
    plan.head({"key": "value"})
    for into, tensor in plan.pairs(tensors):
        into.copy_(tensor)
    memory = torch.frombuffer(bytearray(writer.tensor(0, plan.size).numpy().tobytes()), dtype=torch.uint8)
    header = read_header(memoryview(memory.numpy()))
    read = {tensor.name: tensor_at(memory, header.start, tensor) for tensor in header.tensors}
    assert header.metadata == {**blank(len(tensors)), "key": "value"}
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_state_keeps_its_types():
    value = {"a": (1, [2.5, None]), 3: {"$": "x"}, "nan": float("inf"), "b": b"\0\xff", "t": torch.ones(2), "f": True}
    value |= {"n": np.arange(3, dtype=np.uint32), "s": np.float32(0.1), "deep": {"a.b": 1, "a": {"b": 2}}}
    tensors = {}
    read = decode(json.loads(json.dumps(encode(value, "x", tensors))), tensors)
    assert read["t"].tolist() == [1, 1]
    assert read["n"].dtype == np.uint32
    assert read["n"].tolist() == [0, 1, 2]
    assert isinstance(read["s"], np.float32)
    del read["t"], read["n"], value["t"], value["n"]
    assert read == value


def test_two_tensors_whose_places_read_alike_are_not_mixed_up():
    tensors = {}
    written = encode({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, "x", tensors)
    read = decode(written, tensors)
    assert (read["a"]["b"].item(), read["a.b"].item()) == (0, 1)


def moment(**changed):
    values = {"step": 7, "since_start_s": 100.0, "since_save_s": 10.0, "cost_s": 0.01, "anything_saved": True}
    return Moment(**(values | changed))


@pytest.mark.parametrize(
    ("text", "changed", "due"),
    [
        ("steps:7", {}, True),
        ("steps:7", {"step": 8}, False),
        ("10", {}, True),
        ("10.5", {}, False),
        ("auto", {}, False),  # sqrt(2 × 0.01 × 7200) = 12 s
        ("auto", {"since_save_s": 12.1}, True),
        ("auto", {"since_save_s": 119, "cost_s": 1.0}, False),  # 120 s
        ("auto", {"since_save_s": 121, "cost_s": 1.0}, True),
        ("auto", {"since_start_s": 1.9, "since_save_s": 1.9, "anything_saved": False}, False),
        ("auto", {"since_start_s": 2.1, "since_save_s": 2.1, "anything_saved": False}, True),
    ],
)
def test_a_save_is_due_when_its_cost_and_the_risk_say_so(text, changed, due):
    assert is_due(read_cadence(text), moment(**changed)) == due


@pytest.mark.parametrize("text", ["", "often", "steps:0", "steps:x", "-1", "0", "nan", "inf", "10m"])
def test_a_cadence_that_cannot_be_is_refused(text):
    with pytest.raises(UsageError, match="cannot save every"):
        read_cadence(text)


def test_a_cadence_without_words_is_auto():
    assert read_cadence("auto") == Cadence()
    assert Commit(1, 2) < Commit(2, 1)
