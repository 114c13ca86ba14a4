"""At every moment: where there are machines, or machines are asked for, a shut-off lies ahead; left alone, they end."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.points import STORIES, Point, judge, points
from tests.faults.strikes import Blow
from tests.prove.goal import Figure, Form, Goal
from tests.prove.kill_points import told


def _points(form: Form) -> Iterator[Point]:
    for story in STORIES:
        found = tuple(points(story, Blow.KILL, every=form is Form.LONG, away=True))
        yield from found if form is Form.LONG else found[::2]


def _run(form: Form) -> Iterator[Figure]:
    found = [*told(judge(point) for point in _points(form))]
    yield Figure(name="armed", value=sum(len(verdict.breaches) for verdict in found), limit=0)
    yield Figure(name="armed.alone", value=sum(bool(verdict.wrong) for verdict in found), limit=0)
    yield Figure(name="armed.looks", value=sum(verdict.looks for verdict in found), limit=10_000, least=True)


GOAL = Goal(
    promise="before and after every call: machines, or machines asked for, only behind a shut-off; killed there and"
    " left alone for longer than was paid for, none lives, and the same command still ends the job",
    real="the command line, supervision, lease, books and bootstrap",
    simulated="store, cloud, SSH and agents are fakes over one clock; the cloud keeps its schedule as EC2's does",
    run=_run,
)
