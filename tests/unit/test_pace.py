"""What a job's own attempts tell of its work and of its starts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.state.state import CheckpointRef, ExitReason, UsageInterval
from gpucloud.domain.supervision.membership import pace_of, timed
from gpucloud.domain.supervision.snapshot import Limits
from tests.unit.worlds import NOW, POOL, opened, state

LIMITS = Limits(changeover=timedelta(minutes=12))


def seconds(number):
    return timedelta(seconds=number)


def over(number, **changes):
    return opened("a", number=number, reason=ExitReason.INTERRUPTED, ended_at=NOW, **changes)


def pace(*attempts, work=None, now=NOW, on=1, **changes):
    return pace_of(state(attempts=attempts, **changes), work, now, LIMITS, on)


def test_nobody_knows_how_much_work_there_is_before_the_first_steps_unless_the_job_file_says():
    assert (pace().work, pace().left) == (None, None)
    told = pace(work=timedelta(hours=6))
    assert (told.work, told.left) == (timedelta(hours=6), timedelta(hours=6))


@pytest.mark.parametrize(
    ("attempts", "changes", "left_s"),
    [
        # Measured steps, of which those that are saved need not be made again.
        ([over(1, total_steps=100, pace_s=2.0, saved_step=40, last_step=45)], {}, 120),
        ([over(1, total_steps=100, pace_s=2.0)], {"checkpoint": CheckpointRef(step=90, sha256="0" * 64)}, 20),
        # Those of an attempt that runs count, with a part of the one in the making, and never more than that one.
        ([opened("a", total_steps=100, pace_s=2.0, last_step=45, last_step_at=NOW)], {}, 110),
        ([opened("a", total_steps=100, pace_s=2.0, last_step=45, last_step_at=NOW - seconds(1))], {}, 109),
        ([opened("a", total_steps=100, pace_s=2.0, last_step=45, last_step_at=NOW - seconds(60))], {}, 108),
        # The newest attempt's pace and length count.
        ([over(1, total_steps=50, pace_s=1.0), over(2, total_steps=100, pace_s=3.0)], {}, 300),
    ],
)
def test_the_work_left_is_that_of_the_steps_left(attempts, changes, left_s):
    assert pace(*attempts, work=timedelta(days=9), **changes).left == seconds(left_s)


@pytest.mark.parametrize(
    ("attempts", "left_s"),
    [
        # A step on two of four nodes takes twice as long as on all of them.
        ([opened("a", "b", total_steps=100, pace_s=2.0)], 100),
        # What was timed on all of them counts before what an attempt on fewer tells.
        ([opened("a", "b", "c", "d", total_steps=100, pace_s=1.5), opened("a", "b", number=2, pace_s=2.0)], 150),
        # The newest of those on fewer, where no attempt had them all.
        ([opened("a", "b", total_steps=100, pace_s=2.0), opened("a", "b", "c", number=2, pace_s=2.0)], 150),
    ],
)
def test_on_a_range_of_nodes_work_is_told_in_the_time_of_all(attempts, left_s):
    assert pace(*attempts, on=4).left == seconds(left_s)


def test_machines_that_stood_ready_before_they_took_part_do_not_tell_what_a_start_takes():
    early, late = NOW - seconds(3600), NOW - seconds(3000)
    intervals = (
        UsageInterval(node_id="a", pool=POOL, launched_at=early),
        UsageInterval(node_id="b", pool=POOL, launched_at=late),
    )
    resized = opened("a", number=1, reason=ExitReason.RESIZED, ended_at=NOW, last_step=10)
    resized = replace(resized, started_at=early + seconds(60), stepped_at=early + seconds(90))
    now = replace(opened("a", "b", number=2, first_step=11), started_at=NOW - seconds(30), stepped_at=NOW)

    assert pace(resized, now, on=2, nodes=intervals).changeover == LIMITS.changeover


def test_what_the_job_file_says_counts_by_the_share_that_is_saved_until_steps_are_timed():
    one = over(1, total_steps=100, saved_step=25)
    assert pace(one, work=timedelta(hours=4)).left == timedelta(hours=3)


def test_of_a_script_that_tells_no_total_the_time_of_its_saved_steps_is_done():
    one = over(1, saved_step=600, pace_s=6.0)
    assert pace(one, work=timedelta(hours=4)).left == timedelta(hours=3)


def test_a_step_takes_what_the_clock_says_once_there_are_some_and_never_less_than_their_median():
    first = timed(opened("a", first_step=1, last_step=1, step_seconds=None), NOW)
    assert (first.stepped_at, first.pace_s) == (NOW, None)
    few = timed(replace(first, last_step=6, step_seconds=2.0), NOW + seconds(50))
    assert few.pace_s == 2.0
    many = timed(replace(first, last_step=21, step_seconds=2.0), NOW + seconds(50))
    assert (many.pace_s, many.stepped_at, many.last_step_at) == (2.5, NOW, NOW + seconds(50))


def test_the_first_step_is_put_where_its_median_says_when_it_was_not_seen():
    late = timed(opened("a", first_step=1, last_step=11, step_seconds=2.0), NOW)
    assert late.stepped_at == NOW - seconds(20)


def started(number, node_id, *, after_s, launched_s_ago=1000, **changes):
    """An attempt on a machine of its own, whose first step came so long after the machine's launch."""
    attempt = opened(node_id, number=number, reason=ExitReason.INTERRUPTED, ended_at=NOW, **changes)
    launched = NOW - seconds(launched_s_ago) + timedelta(hours=number)
    interval = UsageInterval(node_id=node_id, pool=POOL, launched_at=launched)
    began = launched + seconds(after_s / 2)
    return replace(attempt, started_at=began, stepped_at=launched + seconds(after_s)), interval


def changeover(*pairs):
    attempts, intervals = zip(*pairs, strict=True) if pairs else ((), ())
    return pace(*attempts, nodes=intervals).changeover


def test_a_start_is_taken_as_guessed_until_three_were_seen_or_one_was_longer():
    assert changeover() == timedelta(minutes=12)
    assert changeover(started(1, "a", after_s=90)) == timedelta(minutes=12)
    assert changeover(started(1, "a", after_s=590), started(2, "b", after_s=900)) == seconds(900)
    three = [started(number, f"n{number}", after_s=100 * number) for number in (1, 2, 3)]
    assert changeover(*three) == seconds(300)


def test_the_first_save_of_a_script_that_tells_no_steps_is_not_its_first_step():
    hourly = started(1, "a", after_s=3600), started(2, "b", after_s=4000)
    assert changeover(*hourly) == seconds(4000)
    saves = [(replace(attempt, counts=Counts.SAVES), interval) for attempt, interval in hourly]
    assert changeover(*saves) == timedelta(minutes=12)
    assert pace(*(a for a, _ in saves), nodes=[i for _, i in saves]).handover == pace(nodes=()).handover


def test_the_first_machines_may_have_stood_ready_for_long():
    assert changeover(started(1, "a", after_s=3600)) == timedelta(minutes=12)


def test_steps_that_were_lost_and_made_again_are_a_part_of_the_start():
    first = started(1, "a", after_s=100, first_step=1, last_step=60, pace_s=10.0)
    second = started(2, "b", after_s=800, first_step=51)
    assert changeover(first, second) == seconds(900)


def test_a_start_on_machines_that_were_there_before_says_what_a_handover_takes():
    first, interval = started(1, "a", after_s=100)
    again = replace(first, number=2, started_at=NOW + seconds(9000), stepped_at=NOW + seconds(9030))
    found = pace(first, again, replace(again, number=3), nodes=(interval,))
    assert found.changeover == timedelta(minutes=12)
    assert found.handover == seconds(50)


def test_saves_of_before_a_script_began_anew_are_no_work_done():
    """200 min of work, a save every 10 min: ten are lost, for the script began anew, and two are made since."""
    lost = replace(opened("a"), reason=ExitReason.LOST, first_step=1, last_step=10, saved_step=10, pace_s=600.0)
    anew = replace(
        opened("a", number=2), reason=ExitReason.LOST, first_step=11, last_step=12, saved_step=12, pace_s=600.0
    )
    saves = CheckpointRef(step=12, sha256="0" * 64, counts=Counts.SAVES)
    whole = timedelta(minutes=200)
    for begun_anew, left in ((False, timedelta(minutes=80)), (True, timedelta(minutes=180))):
        attempts = (lost, replace(anew, begun_anew=begun_anew))
        found = pace_of(state(attempts=attempts, checkpoint=saves), whole, NOW, Limits(), 1)
        assert found.left == left
