"""Use of GPUs over a window: what a policy makes of it, and what is named as its likely cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.job.spec import IdlePolicy
from gpucloud.domain.node.hardware import GpuSample, HostSample
from gpucloud.domain.node.status import Status
from gpucloud.domain.node.use import DeviceUse, GpuUse, UseSpan, likely_cause, warning, wasted
from gpucloud.domain.state.state import Attempt, ExitReason, JobState
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import CloseAttempt
from gpucloud.domain.supervision.snapshot import Snapshot
from gpucloud.usecases.supervise.usage import UsageMeter
from tests.unit.worlds import NOW, opened, part, snapshot, state, up

POLICY = IdlePolicy(below=30, lasting=timedelta(minutes=15))
QUARTER = timedelta(minutes=15)


def use(*percents: float, **changes) -> GpuUse:
    devices = tuple(DeviceUse(node_id="n1", index=i, use=percent) for i, percent in enumerate(percents))
    return replace(GpuUse(covered=QUARTER, devices=devices), **changes)


@pytest.mark.parametrize(
    ("given_use", "policy", "stops"),
    [
        (use(29.9, 29.9), POLICY, True),
        (use(30.0, 30.0), POLICY, False),
        (use(0.0, 59.0), POLICY, True),  # the mean of all GPUs counts, not the best one
        (use(0.0, 60.0), POLICY, False),
        (use(5.0, covered=timedelta(minutes=14, seconds=59)), POLICY, False),  # not seen for long enough
        (use(5.0), None, False),
        (None, POLICY, False),
        (use(), POLICY, False),  # no GPU says how it is used (MIG)
    ],
)
def test_a_job_stops_only_for_a_whole_window_below_its_limit(given_use, policy, stops):
    assert (wasted(given_use, policy) is not None) is stops


def test_the_message_has_the_figures_and_the_likely_cause():
    assert wasted(use(8.0, 10.0, waiting_share=0.62, cpu=35.0), POLICY) == (
        "the GPUs were used 9 % on average over 15 min of training, less than the 30 % of `idle:`; "
        "62% of a step is spent waiting for the next batch; raise num_workers"
    )


@given(percents=st.lists(st.floats(0, 100), min_size=1, max_size=8), seconds=st.integers(0, 3600))
def test_no_job_stops_whose_gpus_are_used_as_much_as_it_wants(percents, seconds):
    found = use(*percents, covered=timedelta(seconds=seconds))
    if found.mean >= POLICY.below or found.covered < POLICY.lasting:
        assert wasted(found, POLICY) is None
    else:
        assert wasted(found, POLICY) is not None


@pytest.mark.parametrize(
    ("given_use", "cause"),
    [
        (
            use(90, 92, 5),
            "GPU 2 of n1 is used 5 %, the others 91 %: its rank is behind, look at its data, disk and CPU",
        ),
        (use(9, waiting_share=0.5), "50% of a step is spent waiting for the next batch; raise num_workers"),
        (
            use(9, waiting_share=0.5, cpu=99),
            "50% of a step is spent waiting for the next batch; "
            "the CPUs are busy: cheaper samples, or machines with more cores",
        ),
        (use(9, cpu=97), "the CPUs are at 97 %: loading data is likely too slow; cheaper samples, or more cores"),
        (use(9, slowdowns=("hw_thermal_slowdown",)), "the GPUs are slowed down by heat (hw_thermal_slowdown)"),
        (use(9, slowdowns=("sw_power_cap",)), "the GPUs are slowed down by the power limit (sw_power_cap)"),
        (use(9, memory=12.4), "only 12 % of GPU memory is used: a larger batch gives the GPUs more to do"),
        (use(9, memory=80, cpu=20), "no cause stands out: `gpucloud train --profile` shows where the time goes"),
    ],
)
def test_the_likely_cause_is_named_with_its_figure(given_use, cause):
    assert likely_cause(given_use) == cause


@pytest.mark.parametrize(
    ("given_use", "warned"),
    [
        (use(29), True),
        (use(31), False),
        (use(29, covered=timedelta(minutes=4, seconds=59)), False),
        (use(95, 95, 95, 4), True),  # one that is behind is worth a word, however busy the others wait
        (None, False),
    ],
)
def test_a_warning_comes_after_five_minutes_of_low_use(given_use, warned):
    assert (warning(given_use) is not None) is warned


# The meter, pass by pass


def gpus(second: float, *percents: int | None) -> tuple[GpuSample, ...]:
    return tuple(
        GpuSample(
            at=NOW + timedelta(seconds=second), index=i, use=percent, memory_used_mib=2000, memory_mib=10000,
            temperature=50, power=300.0,
        )
        for i, percent in enumerate(percents)
    )  # fmt: skip


def world(second: float, *percents: int | None, phase: str = "train", step: int | None = 5, number: int = 1):
    host = HostSample(
        at=NOW, cpu=40.0, memory_used_mib=1, memory_mib=2, disk_free_mib=3, received=0, sent=0
    )  # fmt: skip
    one = up("a", part(number, step=step, phase=phase, waiting_share=0.4))
    status = replace(one.status or Status(heartbeat=1, epoch=1, boot_id="b", notice=None, attempt=None))
    attempt = opened("a", number=number)
    node = replace(one, status=replace(status, gpus=gpus(second, *percents), host=host))
    return attempt, snapshot(node, state=state(attempts=(attempt,)))


def metered(meter: UsageMeter, worlds) -> GpuUse | None:
    found = None
    for attempt, one in worlds:
        found = meter.take(attempt, one)
    return found


def test_the_mean_is_taken_over_the_window_and_over_every_gpu():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    found = metered(meter, [world(s, 100, 100) for s in range(20)] + [world(s, 10, 30) for s in range(20, 31)])
    assert found == GpuUse(
        covered=timedelta(seconds=10),
        devices=(DeviceUse(node_id="a", index=0, use=10.0), DeviceUse(node_id="a", index=1, use=30.0)),
        memory=20.0,
        cpu=40.0,
        waiting_share=0.4,
    )


def test_the_same_sample_seen_twice_counts_once():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    found = metered(meter, [world(s // 5, 50) for s in range(26)])
    assert found is not None
    assert found.covered == timedelta(seconds=5)


def test_saving_and_evaluating_do_not_count():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    quiet = [world(s, 0, phase="evaluate") for s in range(10, 100)]
    found = metered(meter, [world(s, 90) for s in range(10)] + quiet + [world(100, 0, phase="save")])
    assert found is not None
    assert (found.covered, found.mean) == (timedelta(seconds=9), 90.0)


def test_nothing_counts_before_the_first_step():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    found = metered(meter, [world(s, 0, step=0) for s in range(60)])
    assert found is None or not found.devices


def test_the_start_of_a_script_that_reports_later_does_not_count():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    quiet = [world(s, 0, step=None) for s in range(9)]
    found = metered(meter, quiet + [world(s, 90) for s in range(9, 12)])
    assert found is not None
    assert (found.covered, found.mean) == (timedelta(seconds=2), 90.0)


def test_a_script_that_never_reports_is_taken_to_train_all_the_time():
    found = metered(UsageMeter(lasting=timedelta(seconds=10)), [world(s, 5, step=None) for s in range(9)])
    assert found is not None
    assert (found.covered, found.mean) == (timedelta(seconds=8), 5.0)


def test_a_new_attempt_begins_a_new_window():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    metered(meter, [world(s, 0) for s in range(60)])
    found = metered(meter, [world(s, 0, number=2) for s in range(60, 63)])
    assert found is not None
    assert found.covered == timedelta(seconds=2)


def handed_on(meter: UsageMeter, world_of_last) -> tuple[Attempt, Snapshot]:
    """Return the last world with the state as the next process reads it."""
    _, one = world_of_last
    stored = from_json(JobState, to_json(meter.written(one.state)))
    assert stored.attempt is not None
    return stored.attempt, replace(one, state=stored)


def test_another_process_meters_on_from_what_is_stored():
    first, second = UsageMeter(lasting=timedelta(seconds=20)), UsageMeter(lasting=timedelta(seconds=20))
    metered(first, [world(s, 80, None, 100) for s in range(11)])
    before = handed_on(first, world(10, 80, None, 100))[0]
    assert before.members[0].use[0] == UseSpan(seconds=2.0, uses=(80.0, None, 100.0))
    worlds = [world(s, 20, None, 0) for s in range(12, 21)]
    found = metered(second, [(replace(before, first_step=1), one) for _, one in worlds])
    assert found is not None
    assert (found.covered, found.mean) == (timedelta(seconds=20), 50.0)


def test_another_process_counts_nothing_twice_and_a_gap_as_five_seconds_at_most():
    first, second = UsageMeter(lasting=QUARTER), UsageMeter(lasting=QUARTER)
    metered(first, [world(s, 50) for s in range(11)])
    attempt = replace(handed_on(first, world(10, 50))[0], first_step=1)
    assert second.take(attempt, world(10, 50)[1]) == replace(
        first.take(*world(10, 50)), memory=None, cpu=None
    )  # what the causes are told by is gathered anew
    found = second.take(attempt, world(600, 50)[1])
    assert found is not None
    assert found.covered == timedelta(seconds=15)


def test_the_start_of_a_script_that_reports_to_the_next_process_does_not_count():
    first, second = UsageMeter(lasting=QUARTER), UsageMeter(lasting=QUARTER)
    metered(first, [world(s, 0, step=None) for s in range(11)])
    attempt, _ = handed_on(first, world(10, 0, step=None))
    found = metered(second, [(attempt, world(s, 90)[1]) for s in (11, 12)])
    assert found is not None
    assert (found.covered, found.mean) == (timedelta(seconds=1), 90.0)


def test_a_window_is_stored_in_a_few_numbers_and_only_where_a_policy_goes_by_it():
    meter = UsageMeter(lasting=QUARTER)
    metered(meter, [world(s, 50) for s in range(1000)])
    one = world(1000, 50)[1].state
    assert len(meter.written(one).attempts[0].members[0].use) <= 11
    assert UsageMeter().written(one) == one
    closed = transitions.close_attempt(meter.written(one), CloseAttempt(reason=ExitReason.LOST), NOW)
    assert closed.attempts[0].members[0] == one.attempts[0].members[0]


def test_a_gap_in_what_was_seen_counts_as_five_seconds_at_most():
    meter = UsageMeter(lasting=timedelta(minutes=15))
    found = metered(meter, [world(0, 0), world(600, 0)])
    assert found is not None
    assert found.covered == timedelta(seconds=5)


def test_the_user_is_warned_once_an_attempt():
    meter = UsageMeter()
    metered(meter, [world(s, 10) for s in range(302)])
    first = meter.warning()
    assert first is not None
    assert first.startswith("the GPUs are used 10 % on average: 40% of a step")
    assert meter.warning() is None
    metered(meter, [world(s, 10, number=2) for s in range(302, 700)])
    assert meter.warning() is not None


def test_without_gpus_there_is_nothing_to_say():
    meter = UsageMeter(lasting=timedelta(seconds=10))
    assert metered(meter, [world(s) for s in range(60)]) is None
    assert meter.warning() is None
