"""Ctrl-C, twice, SIGTERM, or the terminal closed, at any call: nothing leaks, and what lives until when is said."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults import realpoints
from tests.faults.points import STORIES, Point, Verdict, judge, points
from tests.faults.strikes import Blow
from tests.prove.goal import Figure, Form, Goal
from tests.prove.kill_points import told

_BLOWS = (Blow.INT, Blow.TWICE, Blow.TERM, Blow.HUP)
_EVERY = 7  # in the short form four points of seven meet one of the four blows


def _points(form: Form) -> Iterator[Point]:
    for story in STORIES:
        for turn, blow in enumerate(_BLOWS):
            found = tuple(points(story, blow, every=form is Form.LONG))
            yield from found if form is Form.LONG else found[turn::_EVERY]


def _run(form: Form) -> Iterator[Figure]:
    found: list[Verdict | realpoints.RealVerdict] = [*told(judge(point) for point in _points(form))]
    if form is Form.LONG:
        real = [*told(realpoints.judged(_BLOWS))]
        yield Figure(name="signals.real", value=len(real), limit=100, least=True)
        yield Figure(name="signals.real-unarmed", value=sum(len(one.breaches) for one in real), limit=0)
        found += real
    yield Figure(name="signals", value=sum(bool(verdict.wrong or verdict.breaches) for verdict in found), limit=0)
    yield Figure(name="signals.points", value=len(found), limit=100, least=True)


GOAL = Goal(
    promise="SIGINT, SIGINT twice, SIGTERM and SIGHUP at any call: 0 leaked, exit codes 130 and 143, and what lives"
    " until when is said",
    real="the command line with its handlers, supervision, lease and books; long: processes of the embedded fleet too",
    simulated="store, cloud, SSH and agents are fakes in one process; short: four points of seven meet one of the four"
    " signals",
    run=_run,
)
