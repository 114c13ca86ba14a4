"""Numbers that a script prints: which patterns may be used, what they find in its output, what is made of that."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest

from gpucloud.agent.attempt.running import OutputNumbers
from gpucloud.cli.render.use import printed_words, step_words
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.node.numbers import LONGEST_LINE, Printed, compiled, ends_of, lines_of
from gpucloud.domain.node.status import OUTPUT, UNTOLD, AttemptStatus, Readings, RunState, is_possible_part
from gpucloud.domain.state.state import CheckpointRef
from gpucloud.domain.supervision.membership import hung
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.usecases.jobstore.condition import NodeStanding
from gpucloud.usecases.jobstore.report import report, with_answers
from tests.unit.test_condition import SPEND
from tests.unit.worlds import opened, part, progress, snapshot, state, up

STEP = (("step", r"iter (\d+)"),)


@pytest.mark.parametrize(
    "pattern",
    [
        r"iter (\d+)",
        r"loss[:=] ?([0-9.e+-]+)",
        r"\[(\d+)/\d+\]",
        r"(?:\d{2}:){2}\d+ step (\d+)",
        r"a(?:b|c)?d+ (\S+)",
        r"[(*+)]+(\d+)",
    ],
)
def test_a_pattern_with_one_group_may_be_used(pattern):
    assert compiled(pattern).pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"iter \d+", r"must have one group, the number: (\d+)"),
        (r"(\d+)/(\d+)", "must have one group"),
        (r"iter (\d+", "is no regular expression: missing ), unterminated subpattern at position 5"),
        (r"(a+)+$", "repeats what repeats itself"),
        (r"(?:x*y?)*(\d)", "repeats what repeats itself"),
        (r"(?:(?:ab{2,})c){3} (\d)", "repeats what repeats itself"),
        ("(" + "x" * 200 + ")", "is longer than 200 characters"),
    ],
)
def test_any_other_is_refused(pattern, said):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  what it says is compared
        compiled(pattern)
    assert said in str(refused.value)


def test_lines_are_whole_and_without_colours_and_a_bar_is_one_at_each_return():
    text = "\x1b[32miter 1\x1b[0m loss 2\n\r 10%|# | 1/10\r 20%|## | 2/10\r\ngpucloud: step 7\nhal"
    assert lines_of(text) == (("iter 1 loss 2", " 10%|# | 1/10", " 20%|## | 2/10"), "hal")
    lines, rest = lines_of("x" * 5000 + "\n" + "y" * 5000)
    assert ([len(line) for line in lines], len(rest)) == ([LONGEST_LINE], 2 * LONGEST_LINE)


@pytest.mark.parametrize(
    ("pattern", "lines", "number"),
    [
        (r"iter (\d+)", ("iter 1", "iter 20", "done"), 20.0),
        (r"loss ([0-9.e+-]+)", ("loss 3.2e-4",), 3.2e-4),
        (r"tokens ([0-9,]+)", ("tokens 1,234,567",), 1_234_567.0),
        (r"loss (\S+)", ("loss 2.5", "loss -inf", "loss what"), -math.inf),
        (r"loss (\S+)", ("loss 2.5", "loss 1e301"), 2.5),
        (r"loss (\S+)", ("no number",), None),
        (r"(?:a|(\d))", ("a",), None),
    ],
)
def test_a_number_is_the_last_that_is_one(pattern, lines, number):
    ends = ends_of(compiled(pattern), lines)
    assert (ends[1] if ends is not None else None) == number


def take(printed, rank, numbers, now_s):
    printed.take(rank, {name: (number, number) for name, number in numbers.items()}, now_s)


def test_what_a_step_takes_is_measured_between_looks_that_found_another():
    printed = Printed()
    assert printed.readings(0.0) is None
    for now_s, numbers in ((10.0, {"step": 100.0, "loss": 3.0}), (20.0, {"step": 110.0}), (25.0, {"lr": 0.1})):
        take(printed, 0, numbers, now_s)
    take(printed, 0, {"step": 130.0, "total_steps": 500.0, "loss": 2.0}, 50.0)
    assert printed.readings(53.0) == Readings(
        step=130,
        first_step=100,
        total_steps=500,
        loss=2.0,
        step_seconds=40 / 30,
        longest_s=30.0,
        age_s=3.0,
        values=(("lr", 0.1),),
    )


def test_a_number_is_taken_from_the_rank_that_printed_it_first():
    printed = Printed()
    take(printed, 0, {"step": 5.0}, 1.0)
    take(printed, 7, {"step": 4.0, "loss": 2.0}, 1.0)
    read = printed.readings(2.0)
    assert (read.step, read.loss, read.age_s) == (5, 2.0, 1.0)


def test_steps_that_begin_again_are_no_hang_and_give_no_time_until_there_are_two():
    printed = Printed()
    for now_s, step in ((1.0, 90.0), (2.0, 100.0), (3.0, 0.0)):
        take(printed, 0, {"step": step}, now_s)
    read = printed.readings(4.0)
    assert (read.step, read.first_step, read.step_seconds) == (0, 0, None)


# The agent's part: on from where the last look stopped, and no longer than it may take.


def look(numbers, folder, now_s, progress=None):
    size = (folder / "rank-0.log").stat().st_size
    return numbers.look(((0, size),), progress, now_s=now_s)


def test_steps_that_were_printed_before_the_first_look_are_the_first_ones(tmp_path):
    numbers, log = OutputNumbers(tmp_path, STEP), tmp_path / "rank-0.log"
    log.write_text("".join(f"iter {step}\n" for step in range(1, 61)))
    read = look(numbers, tmp_path, 1.0)
    assert (read.first_step, read.step) == (1, 60)


def test_output_is_read_on_from_where_the_last_look_stopped(tmp_path):
    numbers, log = OutputNumbers(tmp_path, STEP), tmp_path / "rank-0.log"
    log.write_text("iter 1\nite")
    assert look(numbers, tmp_path, 1.0).step == 1
    with log.open("a") as file:
        file.write("r 2\n")
    assert look(numbers, tmp_path, 1.1).step == 1  # not too often
    assert look(numbers, tmp_path, 2.0).step == 2
    with log.open("a") as file:
        file.write("iter 3\n" + "noise\n" * 20_000 + "iter 4\n")
    assert look(numbers, tmp_path, 3.0).step == 4


def test_a_loss_that_is_no_number_any_more_is_shown_as_one_of_gpucloud_resume_is(tmp_path):
    patterns = (("step", r"iter (\w+)"), ("loss", r"loss ([0-9.a-z]+)"), ("norm", r"norm (\S+)"))
    numbers, log = OutputNumbers(tmp_path, patterns), tmp_path / "rank-0.log"
    log.write_text("iter 10 loss 2.5 norm 1.5\niter 20 loss nan norm inf\n")
    read = look(numbers, tmp_path, 1.0)
    assert (read.step, math.isnan(read.loss), read.values) == (20, True, (("norm", math.inf),))
    assert printed_words((("loss", read.loss), *read.values)) == ["loss nan", "norm inf"]
    part = told(loss=read.loss, values=read.values, step=read.step)
    assert is_possible_part(part)
    again = from_json(AttemptStatus, to_json(part))
    assert [(name, str(value)) for name, value in again.numbers] == [("step", "20.0"), ("loss", "nan"), ("norm", "inf")]
    with log.open("a") as file:
        file.write("iter nan loss 3\n")
    assert look(numbers, tmp_path, 2.0).step == 20


def test_a_pattern_that_takes_too_long_over_a_line_is_given_up_and_the_others_stay(tmp_path):
    numbers, log = OutputNumbers(tmp_path, (*STEP, ("slow", r".*.*.*.*.*=(\d)"))), tmp_path / "rank-0.log"
    log.write_text("iter 1\n" + "x" * 900 + "\n")
    began = time.process_time()
    assert look(numbers, tmp_path, 1.0).step == 1
    assert time.process_time() - began < 5
    said = "gpucloud: metrics: slow is not read from the output: its pattern takes too long over a line\n"
    assert log.read_text().endswith(said)
    look(numbers, tmp_path, 2.0)
    assert log.read_text().count("slow is not read") == 1


def test_a_pattern_that_this_python_does_not_know_is_passed_over_with_a_word(tmp_path):
    numbers, log = OutputNumbers(tmp_path, (*STEP, ("new", "(a"))), tmp_path / "rank-0.log"
    assert numbers.look((), progress(7), now_s=0.0) is None  # nothing is printed yet
    log.write_text("iter 1\n")
    assert look(numbers, tmp_path, 1.0).step == 1
    look(numbers, tmp_path, 2.0)
    said = "gpucloud: metrics: new is not read from the output: this machine's Python does not know its pattern\n"
    assert log.read_text() == f"iter 1\n{said}"


def test_steps_that_the_script_reports_itself_are_not_read_from_its_output(tmp_path):
    numbers, log = OutputNumbers(tmp_path, (*STEP, ("lr", r"lr (\S+)"))), tmp_path / "rank-0.log"
    log.write_text("iter 1 lr 0.1\n")
    read = look(numbers, tmp_path, 1.0, progress(7))
    assert (read.step, read.values) == (None, (("lr", 0.1),))
    assert "metrics: step is not read from the output: the script reports its own" in log.read_text()
    assert look(OutputNumbers(tmp_path, STEP), tmp_path, 1.0, progress(7, phase=UNTOLD)).step == 1


# What is made of it.


def told(kept=None, **changes):
    read = Readings(**{
        "step": 340, "first_step": 301, "total_steps": 1000, "loss": 2.5, "step_seconds": 0.5, "longest_s": 5.0,
        "age_s": 1.0, **changes,
    })  # fmt: skip
    return AttemptStatus(
        attempt=1, state=RunState.RUNNING, outcome=None, exit_code=None, progress=kept, failed_rank=None, readings=read
    )


def test_printed_steps_are_shown_and_reckoned_with_unless_the_script_reports_its_own():
    alone = told()
    assert alone.shown == alone.counted
    assert (alone.shown.step, alone.shown.total_steps, alone.shown.phase) == (340, 1000, OUTPUT)
    own = progress(7)
    assert told(own).shown == told(own).counted == own
    assert told(step=None).shown is None


def test_of_a_script_that_saves_by_itself_the_checkpoint_stays_what_its_keeper_says():
    kept = progress(300, phase=UNTOLD, first_step=301, committed_step=300)
    assert (told(kept).counted.step, told(kept).counted.committed_step, told(kept).counted.first_step) == (
        340,
        300,
        301,
    )
    saves = progress(12, phase=UNTOLD, first_step=12, committed_step=12, counts=Counts.SAVES)
    assert told(saves).counted == saves
    assert (told(saves).shown.step, told(saves).shown.committed_step) == (340, 12)
    assert told(saves).numbers == (("step", 340.0), ("loss", 2.5))


@pytest.mark.parametrize(
    ("age_s", "longest_s", "hangs"), [(599.0, 5.0, False), (601.0, 5.0, True), (601.0, 500.0, False)]
)
def test_printed_steps_hang_after_ten_minutes_at_least_or_longer_than_one_ever_took(age_s, longest_s, hangs):
    world = snapshot(up("a", told(age_s=age_s, longest_s=longest_s)), state=state(attempts=(opened("a"),)))
    said = hung(opened("a"), world, Limits())
    assert (said is not None) is hangs
    if hangs:
        assert said == "no other step in the output for 601 s (`metrics: {step: …}`); stacks are in the log"


def test_steps_of_a_script_whose_saves_alone_are_counted_hang_as_well():
    saves = progress(12, phase=UNTOLD, counts=Counts.SAVES)
    world = snapshot(up("a", told(saves, age_s=700.0)), state=state(attempts=(opened("a"),)))
    assert hung(opened("a"), world, Limits()) is not None
    assert hung(opened("a"), world, Limits(hang_printed=timedelta(minutes=20))) is None
    assert hung(opened("a"), snapshot(up("a", part(1)), state=state(attempts=(opened("a"),))), Limits()) is None


def test_a_report_shows_the_step_that_is_printed_and_counts_attempts_in_saves() -> None:
    saves = progress(12, phase=UNTOLD, first_step=1, committed_step=12, counts=Counts.SAVES)
    twelfth = CheckpointRef(step=12, sha256="0" * 64, counts=Counts.SAVES)
    there = up("a", told(saves, values=(("lr", 3e-4),)))
    world = snapshot(there, state=state(attempts=(opened("a", first_step=1, last_step=12),), checkpoint=twelfth))
    known = report(world.state, SPEND, (), world.group, "ada")
    found = with_answers(known, (NodeStanding(node_id="a", status=there.status),))
    assert step_words(found) == ["step 340 of 1000", "2 steps/s", "5 min 30 s to go"]
    assert [one.last_step for one in found.attempts] == [12]
    assert printed_words(found.printed) == ["lr 0.0003"]
