"""A script that knows nothing of gpucloud, and the keeper of its directory: real processes, a real store."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import sys
import time
import zipfile
from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.agent.attempt.files import LEFT_EXIT_CODE
from gpucloud.agent.scripts import watcher
from gpucloud.agent.scripts.putting import Directory
from gpucloud.agent.scripts.script import CheckpointLocation, Reporting, copy, is_whole, look
from gpucloud.agent.scripts.taking import Taking, Took
from gpucloud.agent.scripts.watcher import CheckpointWatcher
from gpucloud.domain.checkpoint.layouts import Additions, KeepOrder, Rule, find_sets
from gpucloud.domain.checkpoint.manifest import Commit, CounterDrop, Counts, Why, seal, unseal
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.spec import Layout, OnNotice
from gpucloud.domain.node.status import Outcome
from tests.standins.bucket import serving
from tests.standins.kept_script import KEEP, PREFIX, KeptScript, until

KINDS = ("file", "hf", "done")
EXPORTS = "zipfile.ZipFile({path!r}, 'w').writestr('a', 'b'); time.sleep({stays_s}); "


@pytest.fixture
def make(tmp_path):
    made = []

    def build(kind="file", **options):
        made.append(KeptScript(tmp_path / "node", kind=kind, **options))
        return made[-1]

    yield build
    for one in made:
        one.kill()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_every_save_at_rest_is_committed_and_another_node_goes_on_from_the_newest(make, kind):
    script = make(kind)
    script.start(steps=30, pause_s=0.05)
    assert script.ended() == 0
    assert script.wrong() is None
    last = script.committed()[0].commit.step
    assert last == (30 if kind != "file" else script.step())

    script.lose_the_disk()
    script.start(steps=40)
    assert script.ended() == 0
    assert "begins at 30\n" in script.said()
    number = f"save {last}" if kind == "file" else f"step {last}"
    assert f"put back the checkpoint of {number}: best effort, what your script saves" in script.said()
    assert script.wrong() is None
    assert script.committed()[0].commit == Commit(2, 40 if kind != "file" else last + 1)


ADDITIONS = Additions(words=("--resume", "{checkpoint}"), variables=(("RESUME_FROM", "{checkpoint}"),))


@pytest.mark.parametrize(("kind", "newest"), [("file", "out/ckpt.pt"), ("hf", "out/checkpoint-20")])
def test_a_script_is_told_to_resume_where_its_checkpoint_was_put_back_and_not_at_the_beginning(make, kind, newest):
    script = make(kind)
    script.start(steps=20, from_scratch=1, waits=kind == "hf", additions=ADDITIONS)
    assert script.ended() == 0
    assert "words \n" in script.said()

    script.lose_the_disk()
    script.start(steps=30, from_scratch=1, waits=kind == "hf", additions=ADDITIONS)
    assert script.ended() == 0
    assert f"the script gets --resume {newest} RESUME_FROM={newest}\n" in script.said()
    assert f"words --resume {newest} {newest}\nbegins at 20\n" in script.said()
    assert "began anew" not in script.said()


def require_told_of_a_new_beginning(script):
    script.start(steps=20, waits=True)
    assert script.ended() == 0
    script.lose_the_disk()
    script.start(steps=30, from_scratch=1, waits=True)
    assert script.ended() == 0
    said = "gpucloud: the script began anew: it saved step 10 after the checkpoint of step 20 was put back; "
    assert script.said().count(said + "tell it to resume by `checkpoint: {resume_args: …}`\n") == 1


def test_a_script_that_begins_at_0_although_its_checkpoint_was_put_back_is_told_of_once(make):
    script = make("hf")
    require_told_of_a_new_beginning(script)
    progress = script.told()
    assert (progress.first_step, progress.counter_drop) == (1, CounterDrop(saved=10, put_back=20))


def test_of_a_script_that_overwrites_one_file_the_counter_in_it_tells_that_it_began_at_0(make):
    script = make("torch")
    require_told_of_a_new_beginning(script)
    progress = script.told()
    assert progress.counts is Counts.SAVES
    assert progress.counter_drop == CounterDrop(saved=10, put_back=20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_killed_in_the_middle_of_a_save_leaves_the_save_before_it(make, kind):
    script = make(kind)
    script.start(steps=20, pause_s=0.005, exit="0")
    assert script.ended() == 0
    before = script.committed()[0].commit
    script.start(steps=40, pause_s=0.1)
    torn = script.out / ("ckpt.pt" if kind == "file" else "checkpoint-30/b.pt")
    old = script.out.stat().st_mtime_ns
    until(lambda: torn.exists() and torn.stat().st_size in range(4096, 16384), f"a torn {torn}, not as of {old}")
    script.kill_script()
    assert script.ended() == 128 + 9
    assert script.wrong() is None
    assert script.committed()[0].commit == before

    script.start(steps=30)  # on the same node, where the torn one lies
    assert script.ended() == 0
    assert "begins at 20\n" in script.said()
    assert script.wrong() is None


def test_a_script_that_fails_keeps_its_last_whole_save_and_its_exit_code(make):
    script = make(settle_s=30.0)
    script.start(steps=10, exit="7")
    assert script.ended() == 7
    assert script.wrong() is None
    assert [one.why for one in script.committed()] == [Why.LAST]


def test_on_a_notice_without_a_signal_the_last_save_is_committed_and_the_script_ended(make):
    script = make()
    script.start(steps=10_000, pause_s=0.05)
    until(lambda: script.step() >= 1, "a commit")
    script.ask_to_stop()
    assert script.ended() == 75
    assert f"left: save {script.step()} is saved" in script.said()
    assert script.wrong() is None
    assert script.committed()[0].commit.step == script.step()


def test_of_a_script_that_leaves_before_its_first_save_no_step_is_called_saved(make):
    script = make("hf")
    script.start(steps=10_000, pause_s=30.0)
    script.ask_to_stop()
    assert script.ended() == 75
    assert "left: nothing is saved\n" in script.said()
    assert not script.committed()


OF_OURS = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call([*sys.argv[1:], '--local_rank=0']))")
PIPED = ("/bin/sh", "-c", '"$@" | tee tee.txt', "sh")


@pytest.mark.parametrize("signal", [OnNotice.SIGTERM, OnNotice.SIGUSR1])
@pytest.mark.parametrize("before", [(), OF_OURS, PIPED])  # as deepspeed starts it, which the signal would end, as tee
def test_on_a_notice_the_script_is_asked_by_its_signal_and_what_it_then_saves_is_committed(make, signal, before):
    script = make("hf")
    script.start(steps=10_000, pause_s=0.005, on=signal, before=before)
    until(lambda: script.step() >= 10, "a commit")
    script.ask_to_stop()
    assert script.ended() == 75
    assert re.search(rf"asked to stop: {signal.value} sent to 1 ranks; \d\d(\.\d)? s to save\n", script.said())
    saved = int(script.said().split("saved when asked ")[1].split()[0])
    newest, *_, oldest = script.committed()
    assert (newest.commit.step, newest.why, oldest.why) == (saved, Why.NOTICE, Why.DUE)
    assert script.wrong() is None


# A script that starts its ranks itself, as PyTorch's own multi-GPU example does; the first has a loader.
SPAWNS = """
import multiprocessing, os, runpy, signal, sys, time
def load():
    signal.signal(signal.SIGTERM, lambda *_: print("a loader was told", flush=True))
    while True:
        time.sleep(0.1)
def rank(number, words):
    sys.argv = words
    if number == 0:
        multiprocessing.get_context("fork").Process(target=load, daemon=True).start()
        return runpy.run_path(words[0], run_name="__main__")
    asked = []
    if "on" in os.environ:
        signal.signal(getattr(signal, os.environ["on"]), lambda *_: asked.append(True))
    while not asked:
        time.sleep(0.01)
    print("the other was told", flush=True)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(number, sys.argv[2:])) for number in (0, 1)]
    [one.start() for one in ranks]
    [one.join() for one in ranks]
"""


@pytest.mark.parametrize("handler", ["save", "none"])
def test_on_a_notice_the_ranks_that_a_script_without_a_handler_has_spawned_are_asked_where_they_have_one(make, handler):
    script = make("hf")
    (script.code / "spawns.py").write_text(SPAWNS)
    before = (sys.executable, "spawns.py")
    script.start(steps=10_000, pause_s=0.005, on=OnNotice.SIGTERM, handler=handler, before=before)
    until(lambda: script.step() >= 10, "a commit")
    script.ask_to_stop()
    assert script.ended() == 75
    told = "SIGTERM sent to 2 ranks" if handler == "save" else "SIGTERM sent, for which no script was found to have"
    assert f"asked to stop: {told}" in script.said()
    assert ("the other was told" in script.said()) is ("saved when asked" in script.said()) is (handler == "save")
    assert "a loader was told" not in script.said().partition("saved when asked")[0]  # the rank ends it at its own end
    if handler == "save":
        saved = int(script.said().split("saved when asked ")[1].split()[0])
        assert (script.committed()[0].commit.step, script.committed()[0].why) == (saved, Why.NOTICE)
    assert script.wrong() is None


# A script whose loaders of data are spawned: torch gives each a handler for SIGTERM.
LOADS = """
import runpy, sys
from torch.utils.data import DataLoader
if __name__ == "__main__":
    loader = iter(DataLoader(range(10**6), num_workers=2, multiprocessing_context="spawn"))
    next(loader)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_on_a_notice_spawned_loaders_of_a_script_without_a_handler_are_no_ranks_that_have_one(make):
    pytest.importorskip("torch")
    script = make("hf")
    (script.code / "loads.py").write_text(LOADS)
    before = (sys.executable, "loads.py")
    script.start(steps=10_000, pause_s=0.005, on=OnNotice.SIGTERM, handler="none", before=before)
    until(lambda: script.step() >= 10, "a commit")
    script.ask_to_stop()
    assert script.ended() == 75
    assert "asked to stop: SIGTERM sent, for which no script was found to have a handler" in script.said()
    assert "DataLoader worker" not in script.said()
    assert script.wrong() is None


SERVICE = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("the service was told", flush=True))
above = os.getppid()
while os.getppid() == above:
    time.sleep(0.1)
"""
BESIDE = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {SERVICE!r}])
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("before", [(), (sys.executable, "-c", BESIDE)])  # a service that has a handler, as wandb's
def test_a_script_without_a_handler_ends_by_the_signal_and_its_last_save_stays(make, before):
    script = make("hf")
    script.start(steps=10_000, pause_s=0.005, on=OnNotice.SIGTERM, handler="none", before=before)
    until(lambda: script.step() >= 10, "a commit")
    script.ask_to_stop(within_s=600.0)
    assert script.ended() == 75
    assert "the service was told" not in script.said()
    assert "asked to stop: SIGTERM sent, for which no script was found to have a handler: it ends " in script.said()
    assert script.committed()[0].commit.step == script.step()
    assert script.wrong() is None


def test_a_script_that_ignores_its_signal_is_ended_in_time(make):
    script = make("hf")
    script.start(steps=10_000, pause_s=0.005, hangs_at=20, on=OnNotice.SIGUSR1, handler="ignore")
    until(lambda: script.step() >= 20, "a commit of the last save before it hangs")
    script.ask_to_stop(within_s=4.0)
    assert script.ended() == 75
    assert script.wrong() is None


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(make):
    script = make("hf")
    script.start(steps=30, waits=True)
    assert script.ended() == 0
    assert [one.commit.step for one in script.committed()] == [30, 20, 10]
    file = script.folder / "store" / PREFIX / "data/000001/000000030/files/checkpoint-30/b.pt"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    script.lose_the_disk()
    script.start(steps=20)
    assert script.ended() == 0
    assert "checkpoint 30 is damaged: passed over" in script.said()
    assert "begins at 20\n" in script.said()


@pytest.mark.parametrize(
    ("change", "said", "barred"),
    [
        (lambda data: b"torn" + data, "none of the 1 checkpoints that are there can be used", False),
        (lambda data: seal({**unseal(data), "format": 9}), "checkpoint 10 cannot be read", True),
    ],
)
def test_no_script_begins_anew_beside_checkpoints_that_cannot_be_read(make, change, said, barred):
    script = make("hf")
    script.start(steps=10)
    assert script.ended() == 0
    manifest = script.folder / "store" / PREFIX / "commit/000001/000000010.json"
    manifest.write_bytes(change(manifest.read_bytes()))
    script.lose_the_disk()
    script.start(steps=20)
    assert script.ended() == 1
    assert said in script.said()
    assert "begins at 0\n" not in script.said().rpartition("could not be put back")[2]
    assert (script.attempt_folder / "barred-0.json").exists() is barred
    assert manifest.exists()


def test_what_was_never_committed_is_set_aside_and_what_came_with_the_code_stays(make):
    script = make("hf")
    shipped = script.out / "checkpoint-1" / "a.pt"
    shipped.parent.mkdir(parents=True)
    with zipfile.ZipFile(shipped, "w") as archive:
        archive.writestr("step", "1")
    script.start(steps=10)
    assert script.ended() == 0
    shutil.copytree(script.out / "checkpoint-10", script.out / "checkpoint-90")
    (script.out / "checkpoint-90" / "trainer_state.json").unlink()
    (script.out / "checkpoint-95").mkdir()
    (script.code / "notes.txt").write_text("mine")
    script.start(steps=20)
    assert script.ended() == 0
    assert "begins at 10\n" in script.said()
    assert "set aside what was never saved: checkpoint-90" in script.said()
    assert shipped.exists()
    assert sorted(os.listdir(script.out)) == ["checkpoint-1", "checkpoint-10", "checkpoint-20"]
    assert (script.code / "notes.txt").read_text() == "mine"


def test_without_a_commit_the_script_begins_as_it_would_on_another_node(make):
    script = make("done")
    script.start(steps=40, pause_s=0.05)
    until((script.out / "checkpoint-10" / "c.pt").exists, "most of the first save")
    script.kill()
    assert script.committed() == ()
    script.start(steps=10)
    assert script.ended() == 0
    assert "begins at 0\n" in script.said()
    assert "set aside what was never saved: checkpoint-10" in script.said()


def test_nothing_of_ours_lies_in_the_directory_and_it_is_not_made_for_the_script(make):
    script = make("hf")
    script.start(steps=5)
    assert script.ended() == 0
    assert not script.out.exists()
    script.start(steps=10)
    assert script.ended() == 0
    assert os.listdir(script.out) == ["checkpoint-10"]


def test_only_so_many_are_kept(make):
    script = make("hf")
    script.start(steps=50, keep=2, waits=True)
    assert script.ended() == 0
    assert [one.commit.step for one in script.committed()] == [50, 40]


def test_a_script_whose_store_refuses_its_saves_is_not_told_that_it_made_none(make):
    script = make()
    (folder := script.folder / "store" / PREFIX).mkdir(parents=True)
    (folder / "data").write_text("in the way")
    script.start(steps=20)
    assert script.ended() == 1
    *_, nothing, last = script.said().splitlines()
    assert nothing.startswith("gpucloud: nothing was saved: ")
    assert last.startswith("gpucloud: its last checkpoint is not saved: ")
    assert f"{PREFIX}/data" in nothing
    assert "no new checkpoint" not in script.said()

    shutil.rmtree(script.out)
    (script.out).mkdir()
    (script.out / "notes.txt").write_text("no checkpoint")
    (folder / "data").unlink()
    script.start(steps=5)
    assert script.ended() == 0
    assert "nothing was saved: no new checkpoint (auto) among the 1 files there\n" in script.said()


def blocked(script, *, until_a_step):
    """Have the store refuse what is saved after that step; return what is in the way."""
    until(lambda: script.step() >= until_a_step, "a commit")
    data = script.folder / "store" / PREFIX / "data"
    data.rename(data.with_name("data-away"))
    data.write_text("in the way")
    return data


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_last_save_that_the_store_does_not_take_is_tried_for_as_long_as_an_upload_may_take(make, is_mended):
    script = make("hf")
    script.start(steps=20, pause_s=0.2, upload=timedelta(seconds=30 if is_mended else 1))
    data = blocked(script, until_a_step=10)
    until(lambda: "saved 20\n" in script.said(), "the last save")
    time.sleep(6 if is_mended else 0)  # longer than it was tried at all
    if is_mended:
        data.unlink()
        data.with_name("data-away").rename(data)
        assert script.outcome() is Outcome.DONE
        assert script.committed()[0].commit.step == 20
        assert script.told().unsaved is None
        return
    assert script.outcome() is Outcome.BARRED  # another attempt goes on from step 10
    assert f"its last checkpoint is not saved: {script.told().unsaved}\n" in script.said()


def failed_while_its_store_is_away(make, **options):
    script = make("hf", **options)
    script.start(steps=20, pause_s=0.2, upload=timedelta(seconds=40), exit=3)
    data = blocked(script, until_a_step=10)
    until(lambda: "saved 20\n" in script.said(), "the last save")
    return script, data


def test_a_script_that_failed_beside_other_machines_is_heard_of_at_once_also_while_its_store_is_away(make):
    script, _ = failed_while_its_store_is_away(make, rule=Rule(nodes=2))
    began = time.monotonic()
    assert script.ended() == 3
    assert time.monotonic() - began < 20


def test_the_last_save_of_a_script_that_failed_on_one_machine_is_tried_as_any_other(make):
    script, data = failed_while_its_store_is_away(make)
    time.sleep(8)  # longer than where peers wait
    data.unlink()
    data.with_name("data-away").rename(data)
    assert script.ended() == 3
    assert script.committed()[0].commit.step == 20


@pytest.mark.parametrize("brings", [True, False])
def test_of_a_notice_half_of_what_is_left_is_for_outputs_to_come_home_where_the_store_is_away(make, brings):
    script = make("hf")
    on, upload = OnNotice.SIGTERM, timedelta(seconds=60)
    script.start(steps=10_000, pause_s=0.05, upload=upload, on=on, brings=brings)
    blocked(script, until_a_step=10)
    began = time.monotonic()
    script.ask_to_stop(within_s=24)
    assert script.ended() == LEFT_EXIT_CODE
    assert (time.monotonic() - began < 18) is brings


class Full(Taking):
    """Whose store is full."""

    def take(self, *_args, **_options):
        raise StoreError("cannot write x", hint="free some space") from OSError(errno.ENOSPC, "full")


def run_with_a_full_store(tmp_path, location, *, code, upload=timedelta(0)):
    (out := tmp_path / "code" / "out").mkdir(parents=True)
    order = KeepOrder(
        code=str(tmp_path / "code"), directory=str(out), rule=Rule(), on_notice=OnNotice.NONE,
        settle=timedelta(seconds=0.1), store=str(tmp_path), prefix=PREFIX, attempt=1, keep=KEEP, rank=0,
        folder=str(tmp_path), first_rank=0, upload=upload,
    )  # fmt: skip
    reporting = Reporting(tmp_path, rank=0)
    taking = Full(location, tmp_path / "copies", Rule(), reporting.say)
    watcher = CheckpointWatcher(order, Directory(out, tmp_path / "code", Rule()), reporting, taking)
    script = f"import zipfile; zipfile.ZipFile({str(out / 'ckpt.pt')!r}, 'w').writestr('a', 'b'); exit({code})"
    return watcher.run((sys.executable, "-c", script), os.environ), reporting


def test_what_the_store_refuses_until_somebody_mends_it_fails_the_script(tmp_path, location):
    code, reporting = run_with_a_full_store(tmp_path, location, code=0)
    assert code == 1
    said = "cannot write x (free some space)"
    assert (json.loads((tmp_path / "progress.json").read_text())["unsaved"], reporting.unsaved) == (said, said)
    assert not (tmp_path / "barred-0.json").exists()  # another attempt would be refused the same


def test_a_script_that_failed_is_heard_of_at_once_where_its_store_would_refuse_its_last_save_again(tmp_path, location):
    began = time.monotonic()
    code, reporting = run_with_a_full_store(tmp_path, location, code=3, upload=timedelta(seconds=40))
    assert (code, reporting.unsaved) == (3, None)
    assert (
        "gpucloud: the last checkpoint could not be saved: cannot write x (free"
        in (tmp_path / "rank-0.log").read_text()
    )
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("outputs", [("out",), ("out/checkpoint-*/", "logs")])
def test_a_last_checkpoint_that_comes_home_as_an_output_is_no_failure_and_is_told(make, outputs):
    script = make("hf")
    script.start(steps=20, pause_s=0.05, outputs=outputs)
    blocked(script, until_a_step=10)
    assert script.outcome() is Outcome.DONE
    assert script.told().unsaved.endswith("; its files come home")


def test_a_script_that_left_nothing_whole_is_over_and_its_end_says_so(make):
    script = make()
    script.out.mkdir()
    (script.out / "notes.txt").write_text("no checkpoint")
    script.start(steps=5)
    assert script.outcome() is Outcome.DONE
    assert script.told().unsaved == "no new checkpoint (auto) among the 1 files there"


def watching(folder):
    said = list[str]()
    order = SimpleNamespace(rule=Rule(), rank=0, folder=str(folder), settle=timedelta(0))
    reporting = SimpleNamespace(say=said.append)
    one = watcher.CheckpointWatcher(order, SimpleNamespace(path=folder), reporting, taking=None)  # type: ignore[arg-type]
    one._began_ns = 0

    def told(count=0):
        listing = look(folder)
        one._tell_none(SimpleNamespace(count=count), find_sets(Rule(), listing), listing)  # type: ignore[arg-type]
        return said

    return told


def written(path, *, minutes_ago):
    path.parent.mkdir(exist_ok=True)
    path.touch()
    at = time.time() - 60 * minutes_ago
    os.utime(path, (at, at))


def test_what_is_missing_of_a_script_whose_files_are_no_checkpoint_is_said_once_while_it_runs(tmp_path):
    told = watching(tmp_path)
    written(tmp_path / "ep_1" / "weights.bin", minutes_ago=0)
    assert not told()
    written(tmp_path / "ep_1" / "weights.bin", minutes_ago=2)
    written(tmp_path / "ep_2" / "weights.bin", minutes_ago=0)  # the next is under way
    written(tmp_path / "log.txt", minutes_ago=0)
    assert not told(count=1)
    (line,) = told()
    assert told() == [line]
    assert line.startswith(
        "nothing is saved yet: ep_1/weights.bin is of no layout that is known; have the script write "
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model_500.npz", "model_1000.npz"),
        ("out/model_500.pkl", "out/model_1000.pkl"),
        ("w_1.h5", "w_2.h5"),
        ("v2/ep_1/w.bin", "v2/ep_2/w.bin"),
    ],
)
def test_each_that_has_a_number_of_its_own_is_told_while_the_next_is_written(tmp_path, old, new):
    told = watching(tmp_path)
    for minutes_ago, path in ((2, old), (0, new)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / path, minutes_ago=minutes_ago)
    (line,) = told()
    assert line.startswith(f"nothing is saved yet: {old} is of no layout that is known; ")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("model_500.npz", "model_1000.npz"),
        ("step_5/w.bin", "step_6/w.bin"),
        ("weights_1.h5", "weights_2.h5"),
        ("params.npz", "params.npz"),
        ("rl_model_100_steps.zip", "rl_model_200_steps.zip"),
    ],
)
def test_what_takes_the_place_of_the_one_before_is_told_at_the_second_save(tmp_path, first, then):
    told = watching(tmp_path)
    written(tmp_path / first, minutes_ago=0.5)
    assert not told()
    if first != then:
        (tmp_path / first).unlink()
    assert not told()
    written(tmp_path / then, minutes_ago=0)
    (line,) = told()
    assert line.startswith(f"nothing is saved yet: {then} is of no layout that is known; have the script write ")


@pytest.mark.parametrize("names", [("losses.npy", "history.pkl", "statistics.npz"), ("model_{}.tmp.npz", "new_{}.npz")])
def test_what_is_no_checkpoint_by_its_name_or_is_renamed_leaves_the_word_to_what_is(tmp_path, names):
    told = watching(tmp_path)
    written(tmp_path / "params.npz", minutes_ago=0.5)
    for epoch in (1, 2):
        for name in names:
            written(tmp_path / name.format(epoch), minutes_ago=0.5 if "{" not in name and epoch == 1 else 0)
        assert not told()
        for name in names:
            if "{" in name:
                (tmp_path / name.format(epoch)).unlink()
        assert not told()
    written(tmp_path / "params.npz", minutes_ago=0)
    (line,) = told()
    assert line.startswith("nothing is saved yet: params.npz is of no layout")


def test_a_file_that_grows_or_is_kept_beside_the_next_and_a_log_are_not_taken_for_what_is_written_again(tmp_path):
    told = watching(tmp_path)
    for minutes_ago in (0.05, 0.03, 0):
        written(tmp_path / "train.npz", minutes_ago=minutes_ago)  # still being written
        written(tmp_path / f"shard_{minutes_ago}.zip", minutes_ago=minutes_ago)
        written(tmp_path / "metrics.json", minutes_ago=1 + minutes_ago)
        assert not told()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("train_cache.npz",), ()),  # data, and not what is saved
        (("vocab_32000.pkl", "cache/mnist10.npz"), ()),
        (("data/train.bin", "vocabulary.pkl"), ()),
        (("step_5/model/weights.bin",), ("step_5/optimizer/weights.bin",)),  # it is still being written
        (("step_5/model.bin",), ("checkpoint-5/model.safetensors",)),
    ],
)
def test_nothing_is_said_to_be_missing_of_data_or_of_what_is_being_written(tmp_path, old, new):
    told = watching(tmp_path)
    for minutes_ago, paths in ((2, old), (0, new)):
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            written(tmp_path / path, minutes_ago=minutes_ago)
    assert not told()


def test_a_checkpoint_that_stays_as_it_was_begun_is_told_beside_a_log_that_is_written(tmp_path):
    told = watching(tmp_path)
    written(tmp_path / "__0_0.distcp", minutes_ago=2)
    written(tmp_path / "log.txt", minutes_ago=0)
    (line,) = told()
    assert line.startswith("nothing is saved yet: the directory is not whole: a checkpoint (layout dcp) is a folder of")


def test_an_attempt_that_was_replaced_is_ended_and_commits_nothing(make):
    script = make("hf")
    script.start(steps=10_000, pause_s=0.01)
    until(lambda: script.step() >= 10, "a commit")
    script.checkpoints.begin(base=script.committed()[0].commit, attempt=9)
    newest = script.committed()[0].commit
    assert script.ended() == 1
    assert "generation 9 has taken over from generation 1" in script.said()
    assert script.committed()[0].commit.step - newest.step in (0, 10)  # one could be on its way
    assert script.wrong() is None


def test_files_that_may_belong_together_are_not_taken_and_the_user_hears_why(make):
    script = make("file", rule=Rule())
    (script.out).mkdir()
    (script.out / "optimizer.pt").write_bytes(b"PK\3\4")
    script.start(steps=10, pause_s=0.02)
    assert script.ended() == 0
    assert script.said().count("nothing is saved: do ckpt.pt and optimizer.pt belong together?") == 1
    assert script.committed() == ()


@pytest.mark.parametrize("stays_s", [0, 1.5])
@pytest.mark.parametrize("export", ["model.pt", "model-00001-of-00002.pt"])
def test_a_model_that_is_exported_beside_the_last_checkpoint_does_not_leave_that_unsaved(make, export, stays_s):
    script = make()
    script.start(steps=30, waits=True, then=EXPORTS.format(path=f"out/{export}", stays_s=stays_s))
    assert script.outcome() is Outcome.DONE
    assert (script.newest_content(), script.told().unsaved) == (30, None)
    assert "its last checkpoint is not saved" not in script.said()
    assert "nothing is saved" not in script.said()
    assert script.said().count("nothing more is saved: ") == 1


@pytest.mark.parametrize("stays_s", [0, 1.5])
def test_a_checkpoint_that_is_written_after_the_last_save_and_not_understood_is_told_as_unsaved(make, stays_s):
    script = make()
    again = EXPORTS.format(path="out/model.pt", stays_s=0) + EXPORTS.format(path="out/ckpt.pt", stays_s=stays_s)
    script.start(steps=30, waits=True, then=again)
    assert script.outcome() is Outcome.DONE  # another attempt would not understand it either
    assert script.newest_content() == 30
    assert script.told().unsaved.startswith("do ckpt.pt and model.pt belong together?")
    assert "its last checkpoint is not saved: do ckpt.pt and model.pt belong together?" in script.said()


@pytest.mark.parametrize(
    ("name", "data", "whole"),
    [
        ("a.pt", b"", False),
        ("a.pt", b"PK\3\4 and no end", False),
        ("a.pt", b"\x80\x02 an old pickle", None),
        ("a.bin", b"anything", None),
        ("a.json", b'{"a": 1}', True),
        ("a.json", b'{"a": 1', False),
        ("a.safetensors", (2).to_bytes(8, "little") + b"{}", True),
        ("a.safetensors", (9).to_bytes(8, "little") + b"{}", False),
        ("a.safetensors", b"short", False),
    ],
)
def test_a_file_shows_by_its_form_whether_it_was_written_to_its_end(tmp_path, name, data, whole):
    (tmp_path / name).write_bytes(data)
    assert is_whole(tmp_path / name) is whole


def test_no_shorter_piece_of_what_torch_saves_is_taken_for_whole(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.arange(300.0), "step": 7}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    assert is_whole(tmp_path / "whole.pt")
    cut = tmp_path / "cut.pt"
    for length in range(0, len(data), 11):
        cut.write_bytes(data[:length])
        assert is_whole(cut) is False, length


def test_in_a_bucket_too_every_name_and_size_comes_back(tmp_path, monkeypatch):
    files = {
        "epoch=1-step=20.ckpt": os.urandom(70_001),
        "deep/a b%2F+ü.json": b"{}",
        "deep/empty.bin": b"",
        "DONE": b"",
    }
    for path, data in files.items():
        (tmp_path / "out" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / path).write_bytes(data)
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.put({}, "kept")
        location = CheckpointLocation("s3://kept/p", PREFIX, keep=2)
        location.checkpoints.begin(base=None, attempt=1)
        said = []
        taking = Taking(location, tmp_path / "copies", Rule(done_file="DONE"), said.append)
        listing = look(tmp_path / "out")
        (one,) = taking.sets(tmp_path / "out", listing).sets
        assert taking.take(tmp_path / "out", one, one.content(listing), proven=True) is Took.SAVED

        other = Directory(tmp_path / "other" / "out", tmp_path / "other", Rule())
        assert other.place(other.fetch_newest(location, said.append), said.append) == Commit(1, 1)
        assert {path: (other.path / path).read_bytes() for path in look(other.path)} == files
        assert said == []


def taken(folder, files, rule, *, location, proven=True):
    """Commit what these files make, written one after the other into `folder`."""
    for n, (path, data) in enumerate(files.items()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        os.utime(folder / path, ns=(n, n))
    taking = Taking(location, folder.parent / "copies", rule, print)
    listing = look(folder)
    one = max(taking.sets(folder, listing).sets, key=lambda one: one.written_ns(listing))
    assert taking.take(folder, one, one.content(listing), proven=proven) is Took.SAVED


def put_back(location, folder, rule):
    other = Directory(folder / "out", folder, rule)
    said = []
    other.place(other.fetch_newest(location, said.append), said.append)
    return {path: (other.path / path).read_bytes() for path in look(other.path)}, said


@pytest.fixture
def location(tmp_path):
    made = CheckpointLocation(str(tmp_path / "store"), PREFIX, keep=2)
    made.checkpoints.begin(base=None, attempt=1)
    return made


def zipped(text="weights"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data", text)
    return out.getvalue()


@pytest.mark.parametrize(
    ("rule", "files", "names"),
    [
        (Rule(), {"model_0004999.pth": zipped(), "last_checkpoint": b"model_0004999.pth"}, None),
        (Rule(), {"epoch_3.pth": zipped(), "last_checkpoint": b"%(out)s/epoch_3.pth"}, b"%(new)s/epoch_3.pth"),
        (Rule(), {"best.pt": zipped("9"), "last.pt": zipped()}, None),
        (Rule(), {"checkpoint.pth.tar": zipped(), "model_best.pth.tar": zipped("9")}, None),
        (
            Rule(),
            {
                "iter_0000100/mp_rank_00/model_optim_rng.pt": zipped(),
                "latest_checkpointed_iteration.txt": b"100",
            },
            None,
        ),
        (
            Rule(layout=Layout.DCP),
            {
                "iter_0000500/__0_0.distcp": b"x",
                "iter_0000500/.metadata": b"__0_0.distcp",
                "latest_checkpointed_iteration.txt": b"500\n",
            },
            None,
        ),
    ],
)
def test_the_file_that_names_the_checkpoint_comes_back_with_it_and_names_it(tmp_path, location, rule, files, names):
    out, new = tmp_path / "node" / "out", tmp_path / "other" / "out"
    files = {path: data.replace(b"%(out)s", str(out).encode()) for path, data in files.items()}
    taken(out, files, rule, location=location)
    found, said = put_back(location, new.parent, rule)
    if names is not None:
        files["last_checkpoint"] = names.replace(b"%(new)s", str(new).encode())
    assert (found, said) == (files, [])


def test_a_file_that_names_only_what_is_torn_is_not_kept_without_it(tmp_path, location):
    rule, files = (
        Rule(layout=Layout.FILE),
        {"a_1.pt": zipped()[:20], "a_2.pt": zipped(), "best": b"a_1.pt", "last": b"a_2.pt"},
    )
    taken(tmp_path / "node/out", files, rule, location=location)
    found, _ = put_back(location, tmp_path / "other", rule)
    assert sorted(found) == ["a_2.pt", "last"]


def test_the_newest_by_its_time_is_the_newest_again(tmp_path, location):
    """As scripts look for it: max(glob("*.pt"), key=getmtime)."""
    rule = Rule(layout=Layout.FILE)
    taken(
        tmp_path / "node/out",
        {"a/best.pt": zipped("9"), "b/ckpt_500.pt": zipped(), "last": b"b/ckpt_500.pt"},
        rule,
        location=location,
    )
    put_back(location, tmp_path / "other", rule)
    times = {
        str(path.relative_to(tmp_path / "other/out")): path.stat().st_mtime_ns
        for path in (tmp_path / "other/out").rglob("*")
    }
    assert times == {"a": 0, "a/best.pt": 0, "b": 1, "b/ckpt_500.pt": 1, "last": 2}


def test_a_file_that_names_what_was_never_saved_is_set_aside_with_that(tmp_path, location):
    node = tmp_path / "node"
    put_back(location, node, Rule())
    taken(node / "out", {"a_1.pt": zipped()}, Rule(), location=location)
    (node / "out" / "a_2.pt").write_bytes(zipped()[:20])
    (node / "out" / "last").write_text("a_2.pt")
    found, said = put_back(location, node, Rule())
    assert (list(found), said) == (["a_1.pt"], ["set aside what was never saved: a_2.pt and 1 more"])


def test_a_file_that_changes_while_it_is_copied_is_not_taken(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ckpt.bin").write_bytes(b"old")
    content = tuple(look(tmp_path / "out").items())
    (tmp_path / "out" / "ckpt.bin").write_bytes(b"new")
    assert not copy(tmp_path / "out", content, tmp_path / "copies")
    (tmp_path / "out" / "ckpt.bin").unlink()
    assert not copy(tmp_path / "out", content, tmp_path / "copies")


def test_progress_says_what_is_saved_and_nothing_of_steps(make):
    script = make("hf")
    script.start(steps=10)
    assert script.ended() == 0
    told = json.loads((script.attempt_folder / "progress.json").read_text())
    del told["written_at"]
    assert told == {"step": 10, "first_step": 1, "phase": "script", "committed_step": 10, "counts": "steps"}
    assert json.loads((script.attempt_folder / "saving.json").read_text())["seconds"] > 0.1
    assert KEEP == 100
