"""At every moment: where there are machines, or machines are asked for, a shut-off lies ahead; left alone, they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.faults import realpoints
from tests.faults.points import STORIES, Point, judge, points
from tests.faults.strikes import Blow
from tests.prove.goal import Figure, Form, Goal
from tests.prove.kill_points import told


def _points(form: Form) -> Iterator[Point]:
    for story in STORIES:
        found = tuple(points(story, Blow.KILL, every=form is Form.LONG, away=True))
        yield from found if form is Form.LONG else found[::4]


def _run(form: Form) -> Iterator[Figure]:
    found = [*told(judge(point) for point in _points(form))]
    breaches = sum(len(verdict.breaches) for verdict in found)
    looks = sum(verdict.looks for verdict in found)
    if form is Form.LONG:
        for command in realpoints.COMMANDS:
            with realpoints.prepared(command) as line:
                seen, more = realpoints.unarmed(line, command)
            print(*seen, sep="\n", end="\n" if seen else "", file=sys.stderr)
            breaches, looks = breaches + len(seen), looks + more
    yield Figure(name="armed", value=breaches, limit=0)
    yield Figure(name="armed.alone", value=sum(bool(verdict.wrong) for verdict in found), limit=0)
    yield Figure(name="armed.looks", value=looks, limit=10_000, least=True)


GOAL = Goal(
    promise="before and after every call: machines, or machines asked for, only behind a shut-off; killed there and"
    " left alone for longer than was paid for, none lives, and the same command still ends the job",
    real="the command line, supervision, lease, books and bootstrap; long: also up, train and down on the embedded"
    " fleet, its records read before and after each call (struck there: kill-points and signals count what they see)",
    simulated="store, cloud, SSH and agents are fakes over one clock; the cloud keeps its schedule as EC2's does",
    run=_run,
)
