"""Killed before or after any call to the outside: the same command again ends it, and nothing is left over."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tests.faults import awspoints, realpoints
from tests.faults.points import STORIES, Point, Verdict, judge, points
from tests.faults.strikes import Blow
from tests.prove.goal import Figure, Form, Goal

Judged = TypeVar("Judged", Verdict, realpoints.RealVerdict)


def told(verdicts: Iterable[Judged]) -> Iterator[Judged]:
    """Pass the verdicts on, and say on standard error which are bad."""
    for verdict in verdicts:
        if verdict.wrong or verdict.breaches:
            print(verdict, file=sys.stderr, flush=True)
        yield verdict


def _points(form: Form) -> Iterator[Point]:
    for story in STORIES:
        yield from points(story, Blow.KILL, every=form is Form.LONG)


def _run(form: Form) -> Iterator[Figure]:
    found: list[Verdict | realpoints.RealVerdict] = [*told(judge(point) for point in _points(form))]
    if form is Form.LONG:
        real = [*told(realpoints.judged((Blow.KILL,)))]
        yield Figure(name="kill-points.real", value=len(real), limit=100, least=True)
        yield Figure(name="kill-points.real-unarmed", value=sum(len(one.breaches) for one in real), limit=0)
        found += real
        aws = [*told(awspoints.judged())]
        yield Figure(name="kill-points.aws", value=len(aws), limit=20, least=True)
        yield Figure(name="kill-points.aws-unarmed", value=sum(len(one.breaches) for one in aws), limit=0)
        found += aws
    yield Figure(name="kill-points", value=sum(bool(verdict.wrong or verdict.breaches) for verdict in found), limit=0)
    yield Figure(name="kill-points.points", value=len(found), limit=100, least=True)


GOAL = Goal(
    promise="SIGKILL before or after any call of up, train and down to the outside: 0 leaked, 0 twins, 0 need a hand",
    real="the command line, supervision, lease, books and bootstrap; in the long form all of it: processes of the"
    " embedded fleet, SSH, the store on disk, Terraform",
    simulated="short: store, cloud, SSH and agents are fakes in one process, work beside is done in line, the lease is"
    " not renewed beside, and calls that only read are struck with the next that changes something; long: each call of"
    " the fakes, and on the embedded fleet each kind of call that changes something, the first two times it is made;"
    " a point that cannot be reached counts as wrong; AWS is the lab, where up and down are killed at a sample of 22 of"
    " their calls, not at each",
    run=_run,
)
