"""How a script saves: what its code tells before any money is spent, and what is said of it once it runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpucloud.adapters.jobfile import read_job
from gpucloud.adapters.scripts import look
from gpucloud.cli.render.plans import saved_rows
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.cli.render.ways import home_lines
from gpucloud.domain.checkpoint.layouts import step_drop
from gpucloud.domain.checkpoint.manifest import CounterDrop, Counts
from gpucloud.domain.checkpoint.protection import Code, Saving, must_be_meant, protection_of
from gpucloud.domain.errors import JobFileError
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy, Cloud, MarketPolicy, OnNotice, Resources
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import NO_GROUP
from gpucloud.domain.node.status import OUTPUT, UNTOLD, Stop
from gpucloud.domain.state.state import (
    CheckpointRef,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobStatus,
    MissingOutput,
    Owner,
    UsageInterval,
)
from gpucloud.domain.supervision.action import EndAttempt, NoteInterruptions, OpenAttempt, Wait
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.usecases.jobstore.report import report
from gpucloud.usecases.supervise.act import Announcements
from gpucloud.usecases.supervise.story import tell_story
from tests.unit.worlds import NOW, POOL, job, opened, part, snapshot, state, up

LIBRARY = "from gpucloud import resume\n"
PLAIN = "import torch\n"


@pytest.mark.parametrize(
    ("files", "run", "found"),
    [
        ({"train.py": LIBRARY}, "train.py --epochs 3", Code(script="train.py", reached=True)),
        ({"train.py": "import engine\n", "engine.py": LIBRARY}, "train.py", Code(script="train.py", reached=True)),
        (
            {"src/train.py": "from lib.loop import fit\n", "src/lib/__init__.py": "", "src/lib/loop.py": LIBRARY},
            "src/train.py",
            Code(script="src/train.py", reached=True),
        ),
        (
            {"pkg/__init__.py": "", "pkg/train.py": "from .loop import fit\n", "pkg/loop.py": LIBRARY},
            "python -m pkg.train",
            Code(script="pkg/train.py", reached=True),
        ),
        ({"train.py": PLAIN}, "train.py", Code(script="train.py")),
        ({"train.py": PLAIN, "other.py": LIBRARY}, "train.py", Code(script="train.py", elsewhere="other.py")),
        ({"train.py": PLAIN}, "accelerate launch train.py", Code(script="train.py")),
        ({"train.py": PLAIN}, "bash run.sh", Code(script=None)),
        ({"train.py": "def (:\n"}, "train.py", Code(script="train.py")),
        ({}, "/opt/train.py", Code(script=None)),
    ],
)
def test_what_the_code_tells_is_read_from_the_script_and_what_it_imports(tmp_path, files, run, found):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert look(tmp_path, run) == found


DIRECTORY = CheckpointPolicy(directory=CheckpointDirectory(path="out"))
NONE = CheckpointPolicy(none=True)
REF = CheckpointRef(step=3, sha256="0" * 64)


@pytest.mark.parametrize(
    ("code", "policy", "saving", "row", "warning"),
    [
        (
            Code(script="train.py", reached=True),
            NONE,
            Saving.RESUME,
            "by gpucloud.resume; an interruption costs a restart, and without notice the steps since the last save",
            None,
        ),
        (
            Code(script="train.py"),
            DIRECTORY,
            Saving.DIRECTORY,
            "what is whole in out/; an interruption costs the work since",
            None,
        ),
        (
            Code(script="train.py"),
            CheckpointPolicy(directory=CheckpointDirectory(path="out", on_notice=OnNotice.SIGTERM)),
            Saving.DIRECTORY,
            "asked by SIGTERM at a notice, and what is whole in out/; an interruption without one costs the work since",
            None,
        ),
        (
            Code(script="train.py"),
            NONE,
            Saving.NONE,
            "nothing, as the job file says; an interruption starts it at the beginning",
            None,
        ),
        (
            Code(script="train.py"),
            CheckpointPolicy(),
            Saving.NOTHING,
            "NOTHING: an interruption starts it at the beginning",
            "train.py does not save: an interruption starts it at the beginning",
        ),
        (
            Code(script="train.py", elsewhere="old.py"),
            CheckpointPolicy(),
            Saving.UNKNOWN,
            "not known before it runs: old.py uses gpucloud.resume, and it may be that train.py uses it",
            None,
        ),
        (
            Code(script=None),
            CheckpointPolicy(),
            Saving.UNKNOWN,
            "not known before it runs: no script of the code folder is named in `run`",
            None,
        ),
    ],
)
def test_a_plan_says_how_the_script_saves_and_what_an_interruption_costs(code, policy, saving, row, warning):
    found = protection_of(job(checkpoint=policy), code)
    assert (found.saving, found.row, found.warning) == (saving, row, warning)


ALL = "what the script writes goes with its machines; name it in `outputs:`"
EXPORT = "; checkpoints stay in the job's store, `gpucloud checkpoints {} --export FILE` gives the weights"
PULL = "; checkpoints stay in the job's store, `gpucloud checkpoints {} --pull FOLDER` brings one"


@pytest.mark.parametrize(
    ("code", "changes", "said"),
    [
        (Code(script="train.py"), {}, f"NOTHING comes home: {ALL}"),
        (Code(script="train.py"), {"checkpoint": NONE}, f"NOTHING comes home: {ALL}"),
        (Code(script="train.py"), {"checkpoint": DIRECTORY}, f"no file comes home: {ALL}{PULL.format('JOB')}"),
        (Code(script="train.py", reached=True), {}, f"no file comes home: {ALL}{EXPORT.format('JOB')}"),
        (
            Code(script=None),
            {},
            f"no file comes home: {ALL}; what gpucloud.resume saves stays in its store",
        ),
        (Code(script="train.py", reached=True), {"trial": "8"}, None),
    ],
)
def test_without_outputs_a_plan_says_what_goes_with_the_machines_and_what_stays(code, changes, said):
    assert saved_rows(protection_of(job(**changes), code)).get("results") == said


@pytest.mark.parametrize(
    ("after", "changes", "said"),
    [
        ({"status": JobStatus.SUCCEEDED}, {"saves": NONE}, [f"nothing has come home: {ALL}"]),
        ({"status": JobStatus.SUCCEEDED}, {"saves": DIRECTORY}, [f"nothing has come home: {ALL}"]),
        (
            {"status": JobStatus.SUCCEEDED, "checkpoint": REF},
            {"saves": CheckpointPolicy()},
            [f"no file has come home: {ALL}{EXPORT.format('digits')}"],
        ),
        (
            {"status": JobStatus.SUCCEEDED, "checkpoint": REF},
            {"saves": DIRECTORY},
            [f"no file has come home: {ALL}{PULL.format('digits')}"],
        ),
        ({"status": JobStatus.SUCCEEDED, "checkpoint": REF}, {"saves": None}, [f"no file has come home: {ALL}"]),
        ({"status": JobStatus.SUCCEEDED}, {"outputs": ("results/",)}, []),  # nobody knows where, as with another disk
        (
            {"status": JobStatus.SUCCEEDED},
            {"outputs": ("results/",), "home": "/home/me/outputs/digits"},
            ["outputs: results/ is home, in /home/me/outputs/digits"],
        ),
        (
            {"status": JobStatus.SUCCEEDED},
            {
                "outputs": ("results/", "m/", "*.csv"),
                "home": "/home/me/outputs/digits",
                "missing_outputs": (MissingOutput(path="m/", why="did not come home"),),
            },
            ["outputs: m/ did not come home", "outputs: results/, *.csv are home, in /home/me/outputs/digits"],
        ),
        ({"status": JobStatus.SUCCEEDED}, {"rehearses": True}, []),
        ({"status": JobStatus.SUCCEEDED, "torn_down": False}, {}, []),  # not over
        ({"status": JobStatus.FAILED}, {"saves": NONE}, []),
        (
            {"status": JobStatus.FAILED},
            {"outputs": ("results/",), "home": "/home/me/outputs/digits, beside 11 files that were there before"},
            ["outputs: results/ is home, in /home/me/outputs/digits, beside 11 files that were there before"],
        ),
        (
            {"status": JobStatus.SUCCEEDED, "torn_down": False},
            {"outputs": ("results/",), "home": "/home/me/outputs/digits"},
            ["outputs: results/ is home, in /home/me/outputs/digits"],
        ),
    ],
)
def test_at_the_end_it_is_said_what_has_come_home_and_what_has_not(after, changes, said):
    over = state(**{"torn_down": True, **after})
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    known = replace(report(over, spend, (), NO_GROUP, None), signed_by="own", **changes)
    assert home_lines(known) == said == report_json(known)["results"]
    assert all(line in report_text(known) for line in said)


@pytest.mark.parametrize(
    ("cloud", "market", "policy", "meant"),
    [
        (Cloud.AWS, MarketPolicy.SPOT, CheckpointPolicy(), True),
        (Cloud.AWS, MarketPolicy.AUTO, CheckpointPolicy(), True),
        (Cloud.AWS, MarketPolicy.ON_DEMAND, CheckpointPolicy(), False),
        (Cloud.AWS, MarketPolicy.SPOT, NONE, False),
        (Cloud.LOCAL, MarketPolicy.SPOT, CheckpointPolicy(), False),
        (Cloud.SSH, MarketPolicy.SPOT, CheckpointPolicy(), False),
    ],
)
def test_somebody_must_mean_it_where_machines_cost_money_and_may_be_interrupted(cloud, market, policy, meant):
    wanted = job(cloud=cloud, resources=Resources(market=market), checkpoint=policy)
    assert must_be_meant(wanted, protection_of(wanted, Code(script="train.py"))) is meant


def test_the_job_file_says_that_nothing_is_saved(tmp_path):
    file = tmp_path / "job.yaml"
    text = "name: x\nrun: train.py\nbudget: 1 USD\ncheckpoint: "
    (tmp_path / "train.py").write_text(PLAIN)
    file.write_text(f"{text}none\n")
    assert read_job(file).checkpoint == NONE
    file.write_text(f"{text}never\n")
    with pytest.raises(JobFileError, match="checkpoint: must be a mapping of keys to values, or none"):
        read_job(file)


def test_that_a_drill_waits_for_a_first_step_is_told_once():
    waits = Wait(why="the drill waits for the script's first step, 10 min at the most")
    world = snapshot(up("a", part(1)), state=state(attempts=(replace(opened("a"), started_at=NOW),)))
    announcements = Announcements()
    assert announcements.news(waits, world, Limits()) == (waits.why,)
    assert announcements.news(waits, world, Limits()) == ()


def lines(attempt, *nodes, policy=None):
    world = snapshot(*nodes, state=state(attempts=(attempt,)))
    return Announcements().news(Wait(why="running"), world, Limits(), policy)


def test_the_first_minute_says_how_the_script_saves_by_its_own_word():
    young = replace(opened("a"), started_at=NOW - timedelta(seconds=59))
    told = (
        "the script saves with gpucloud.resume: an interruption costs a restart,"
        " and without notice the steps since the last save",
    )
    silent = ("the script has not called gpucloud.resume so far: an interruption starts it at the beginning",)
    assert lines(young, up("a", part(1, step=0)))[:-1] == told  # and what is taken for a hang
    owner = Owner(id="b", pid=1, host="vm", started="1", since=NOW - timedelta(seconds=1))
    world = snapshot(up("a", part(1, step=0)), state=state(attempts=(young,), owner=owner))
    assert Announcements().news(Wait(why="running"), world, Limits()) == ()  # who takes over says it no second time
    assert lines(young, up("a", part(1))) == ()
    assert lines(opened("a"), up("a", part(1))) == silent
    assert lines(opened("a"), up("a", part(1)), policy=CheckpointPolicy(none=True)) == ()
    assert lines(opened("a"), up("a", part(1)), policy=DIRECTORY) == ()


DROP = CounterDrop(saved=10, put_back=100)


def anew(saved, first_step, policy=DIRECTORY, **changes):
    part_ = part(1, step=saved, first_step=first_step, phase=UNTOLD, committed_step=saved, **changes)
    return lines(opened("a"), up("a", part_), policy=policy)


def test_a_script_that_began_at_0_although_its_checkpoint_was_put_back_is_told_of_with_the_way_out():
    assert anew(10, 1, counter_drop=DROP) == (
        "the script began anew: it saved step 10 after the checkpoint of step 100 was put back; "
        "tell it to resume by `checkpoint: {resume_args: …}`",
    )
    told = CheckpointPolicy(directory=CheckpointDirectory(path="out", resume_args=("--resume",)))
    assert anew(10, 1, told, counter_drop=DROP)[0].endswith("was put back; --resume did not have it resume")
    assert anew(100, 101) == anew(110, 101) == anew(10, 1) == anew(10, 101, counts=Counts.SAVES) == ()


@pytest.mark.parametrize(("saved", "drop"), [(10, DROP), (99, CounterDrop(saved=99, put_back=100)), (100, None)])
def test_a_first_save_of_a_lower_step_than_what_was_put_back_shows_that_a_script_began_anew(saved, drop):
    assert step_drop(saved, 100) == drop


def test_a_script_whose_saves_are_only_counted_is_told_of_by_the_counter_in_its_file():
    way_out = "tell it to resume by `checkpoint: {resume_args: …}`"
    by_step = anew(3, 3, counts=Counts.SAVES, counter_drop=CounterDrop(saved=250, put_back=2000))
    assert by_step == (
        f"the script began anew: it saved step 250 after the checkpoint of step 2000 was put back; {way_out}",
    )
    by_epoch = anew(3, 3, counts=Counts.SAVES, counter_drop=CounterDrop(saved=0, put_back=12, epochs=True))
    assert by_epoch == (
        f"the script began anew: it saved epoch 0 after the checkpoint of epoch 12 was put back; {way_out}",
    )


def test_that_a_script_began_anew_is_told_once_in_an_attempt():
    begun = part(1, step=10, first_step=1, phase=UNTOLD, committed_step=10, counter_drop=DROP)
    later = part(1, step=20, first_step=1, phase=UNTOLD, committed_step=20, counter_drop=DROP)
    announcements, told = Announcements(), []
    for one in (begun, later):
        world = snapshot(up("a", one), state=state(attempts=(opened("a"),)))
        told += announcements.news(Wait(why="running"), world, Limits(), DIRECTORY)
    assert len(told) == 1


def test_a_restart_says_what_was_done_in_vain():
    first = opened("a", reason=ExitReason.INTERRUPTED, ended_at=NOW - timedelta(seconds=44))
    action = OpenAttempt(number=2, node_ids=("a", "b"))
    assert tell_story(action, snapshot(state=state(attempts=(first,)))) == (
        "attempt 2 starts from the beginning on a, b (no checkpoint): 16 s of work lost"
    )
    seen = replace(
        first, first_step=1, last_step=9, stepped_at=NOW - timedelta(seconds=58), last_step_at=first.ended_at
    )
    for unheard_s, words in ((0, "14 s"), (5, "9 s"), (11, "at least 3 s")):
        one = replace(seen, last_step_at=seen.last_step_at - timedelta(seconds=unheard_s))
        assert tell_story(action, snapshot(state=state(attempts=(one,)))) == (
            f"attempt 2 starts from the beginning on a, b (no checkpoint): {words} of work lost"
        )
    saved = state(attempts=(first,), checkpoint=CheckpointRef(step=153, sha256="0" * 64))
    assert tell_story(action, snapshot(state=saved)) == "attempt 2 starts after step 153 on a, b"
    assert tell_story(replace(action, number=1), snapshot()) == "attempt 1 starts on a, b"
    told = CheckpointDirectory(path="out", resume_args=("--init_from=resume",), resume_variables=(("AT", "the end"),))
    assert tell_story(action, snapshot(state=saved), told) == (
        "attempt 2 starts after step 153 on a, b, with --init_from=resume 'AT=the end'"
    )
    assert tell_story(replace(action, number=1), snapshot(), told) == "attempt 1 starts on a, b"


def test_a_notice_does_not_say_that_a_script_saves_which_does_not():
    notice = Interruption(node_id="a", kind=InterruptionKind.NOTICE, attempt=1, noticed_at=NOW)
    action, opening = NoteInterruptions(interruptions=(notice,)), state(attempts=(opened("a"),))
    assert tell_story(action, snapshot(up("a", part(1, step=3)), state=opening)) == "a has a notice: saving"
    told = tell_story(action, snapshot(up("a", part(1)), state=opening))
    assert told == "a has a notice: no checkpoint of its script is known"


@pytest.mark.parametrize(
    ("phase", "committed", "asked", "said"),
    [
        (UNTOLD, None, OnNotice.NONE, "its script has saved nothing so far"),
        (UNTOLD, 50, OnNotice.NONE, "what its script has saved is kept"),
        (OUTPUT, 50, OnNotice.NONE, "what its script has saved is kept"),
        (OUTPUT, None, OnNotice.NONE, "its script has saved nothing so far"),
        (UNTOLD, None, OnNotice.SIGTERM, "saving"),
        (OUTPUT, 50, OnNotice.SIGUSR1, "saving"),
        ("train", None, OnNotice.NONE, "saving"),
    ],
)
def test_a_notice_says_that_a_script_saves_where_it_is_asked_to(
    phase: str, committed: int | None, asked: OnNotice, said: str
) -> None:
    notice = Interruption(node_id="a", kind=InterruptionKind.NOTICE, attempt=1, noticed_at=NOW)
    progress = part(1, step=committed or 30, first_step=1, phase=phase, committed_step=committed)
    told = tell_story(
        NoteInterruptions(interruptions=(notice,)),
        snapshot(up("a", progress), state=state(attempts=(opened("a"),))),
        CheckpointDirectory(path="out", on_notice=asked),
    )
    assert told == f"a has a notice: {said}"


STOPS = EndAttempt(how=Stop.SAVE, reason=ExitReason.STOPPED)


@pytest.mark.parametrize(
    ("phase", "committed", "saved", "said"),
    [
        (UNTOLD, None, None, "ending the attempt, whose script has saved nothing so far: stopped"),
        (OUTPUT, None, None, "ending the attempt, whose script has saved nothing so far: stopped"),
        (UNTOLD, 50, None, "ending the attempt once what its script has saved is kept: stopped"),
        (UNTOLD, None, 50, "ending the attempt once what its script has saved is kept: stopped"),
    ],
)
def test_the_end_of_an_attempt_that_has_saved_nothing_does_not_say_that_its_saves_are_kept(
    phase: str, committed: int | None, saved: int | None, said: str
) -> None:
    told = part(1, step=committed or 0, first_step=1, phase=phase, committed_step=committed)
    checkpoint = CheckpointRef(step=saved, sha256="0" * 64) if saved is not None else None
    world = snapshot(up("a", told), state=state(attempts=(opened("a"),), checkpoint=checkpoint))
    line = tell_story(STOPS, world, CheckpointDirectory(path="out"))
    assert line is not None
    assert line.startswith(f"{said}; ")


@pytest.mark.parametrize(("phase", "known"), [(None, False), (OUTPUT, False), ("train", True), ("start", True)])
def test_who_asks_a_script_to_save_that_has_not_called_the_library_says_so(phase: str | None, known: bool) -> None:
    told = part(1, step=30 if phase else None, **({"phase": phase} if phase else {}))
    line = tell_story(STOPS, snapshot(up("a", told), state=state(attempts=(opened("a"),))))
    though = "" if known else ", though it has not called gpucloud.resume so far"
    assert line is not None
    assert line.startswith(f"asking the script to save and leave{though}: stopped; ")


def test_a_plan_says_from_which_machine_outputs_come_home_and_what_takes_them_along():
    found = protection_of(job(outputs=("results/", "best.pt")), Code(script="train.py", reached=True))
    assert saved_rows(found)["results"] == (
        "results/, best.pt come home when the job ends, from the machine of rank 0, and when that is interrupted,"
        " as much as its notice leaves time for; without one, what was written there goes with it"
    )
    driven = saved_rows(found, driven=True)["results"]
    assert driven.startswith("results/, best.pt come into the job's store when the job ends, from the machine of")
    assert driven.endswith("; from the store the next `train`, `reconcile` or `down` here brings them home")
    nothing = saved_rows(protection_of(job(outputs=("results/",)), Code(script="train.py")))["results"]
    assert nothing.endswith(
        "; it saves nothing, and is ended in time for that: at once at a notice, and up to 1 min before the budget ends"
    )
    unknown = saved_rows(protection_of(job(outputs=("results/",)), Code(script=None)))["results"]
    assert unknown.endswith(
        "is ended in time for that: halfway through a notice, and up to 30 s before the budget ends"
    )


@pytest.mark.parametrize(
    ("known", "lost"),
    [
        ({"first_step": 1}, ""),  # its script had come to no step yet
        ({"first_step": 1, "last_step": 1, "stepped_at": 30, "last_step_at": 30, "step_seconds": 2.0}, "at least 2 s"),
        ({"first_step": 1, "last_step": 9, "stepped_at": 30, "last_step_at": 14, "pace_s": 2.0}, "18 s"),
        ({"first_step": 1, "last_step": 9, "stepped_at": 30, "last_step_at": 4, "pace_s": 2.0}, "22 s"),
        ({}, "50 s"),  # it tells no steps: for as long as its machine was there
    ],
)
def test_waiting_is_no_work_that_an_interruption_undid(known: dict[str, Any], lost: str) -> None:
    """Its machine ended 10 s ago, and that was seen just now; it had begun a minute ago."""
    ago = {name: NOW - timedelta(seconds=s) for name in ("stepped_at", "last_step_at") if (s := known.get(name))}
    first = opened("a", reason=ExitReason.LOST, ended_at=NOW, **{**known, **ago})
    ended = NOW - timedelta(seconds=10)
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - timedelta(hours=1), ended_at=ended)
    told = tell_story(OpenAttempt(number=2, node_ids=("a",)), snapshot(state=state(attempts=(first,), nodes=(life,))))
    work = f": {lost} of work lost" if lost else ""
    assert told == f"attempt 2 starts from the beginning on a (no checkpoint){work}"
