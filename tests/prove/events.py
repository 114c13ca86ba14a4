"""Whoever drives a job, and whoever is killed at it: each of its events is stored once, none is missing or invented."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.faults.points import OF_EVENTS, STORIES, judge, points
from tests.faults.strikes import Blow
from tests.prove.goal import Figure, Form, Goal
from tests.sim.happenings import Outcome, Schedule
from tests.sim.many import each

_RUNS = {Form.SHORT: 34, Form.LONG: 5_000}
_KILLED = {Form.SHORT: 500, Form.LONG: 40_000}
_EACH = {Form.SHORT: 32, Form.LONG: 1}
"""Of the calls of a whole `train`, so many-th is struck here; `kill-points` strikes them all."""


def run(form: Form) -> Iterator[Figure]:
    """Count the schedules, and the kills of whole commands, after which an event was missing, twice or of nothing."""
    wrong, killed, rivals, events, delayed = 0, 0, 0, 0, 0
    for seed, outcome in each(schedule, _RUNS[form], form):
        wrong += bool(outcome.wrong)
        killed, rivals = killed + outcome.killed, rivals + outcome.rivals
        events, delayed = events + outcome.events, delayed + outcome.delayed
        for line in outcome.wrong[:3]:
            sys.stderr.write(f"events: seed {seed}: {line}\n")
    struck = [point for story in STORIES for point in [*points(story, Blow.KILL, every=False)][2 :: _EACH[form]]]
    for verdict in map(judge, struck):
        for line in (line for line in verdict.wrong if line.startswith(OF_EVENTS)):
            wrong += 1
            sys.stderr.write(f"events: {verdict.point} ({verdict.call}): {line}\n")
    yield Figure(name="events", value=wrong, limit=0)
    yield Figure(name="events.kill-points", value=killed + len(struck), limit=_KILLED[form], least=True)
    yield Figure(name="events.two-at-once", value=rivals, limit=_RUNS[form], least=True)
    yield Figure(name="events.stored", value=events, limit=20 * _RUNS[form], least=True)
    yield Figure(name="events.delayed", value=delayed, limit=_RUNS[form] / 2, least=True)


def schedule(seed: int) -> Outcome:
    """Return what the schedule of that seed showed."""
    return Schedule(seed).run()


GOAL = Goal(
    promise="supervisors of one job are killed at any call to the store, paused past their lease beside a successor,"
    " lose replies, and find a store that takes no events: each event is stored once, none is missing, none invented",
    real="the lease with its renewals, the events as they are made, written with the state, and put; for the whole "
    "commands the command line and supervision too",
    simulated="the object store, time, processes and their deaths, and what happens to the job; for the whole commands "
    "what `kill-points` says",
    run=run,
)
