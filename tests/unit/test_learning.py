"""The learned policy's tables are made beside everything else, and again when the job turns out to be another one."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from gpucloud.domain.market.learned import Lesson
from gpucloud.domain.market.policies import Task
from gpucloud.usecases.services import Learning

TASK = Task(work_s=36000, span_s=50000, changeover_s=600, on_demand_usd_per_hour=3.0)
LESSON = Lesson(task=TASK, zones=3, gpus=1, spot_usd_per_hour=1.0)


class Later:
    """An executor whose work is done when the test says."""

    def __init__(self):
        self.asked = []

    def submit(self, make, lesson):
        future = Future()
        self.asked.append((future, make, lesson))
        return future

    def work(self):
        future, make, lesson = self.asked[-1]
        future.set_result(make(lesson))


def test_there_are_none_until_they_are_made_and_old_ones_hold_until_the_new_are():
    later = Later()
    learning = Learning(make=lambda lesson: f"for {lesson.task.work_s:.0f} s", pool=later)
    assert learning.tables(None) is None
    assert learning.tables(LESSON) is None
    later.work()
    assert learning.tables(LESSON) == "for 36000 s"

    much_more = replace(LESSON, task=replace(TASK, work_s=45000))
    assert learning.tables(much_more) == "for 36000 s"
    later.work()
    assert learning.tables(much_more) == "for 45000 s"
    assert len(later.asked) == 2


def test_a_job_that_differs_a_little_is_the_same():
    later = Later()
    learning = Learning(make=lambda lesson: "tables", pool=later)
    for work_s in (36000, 37000, 39000):
        learning.tables(replace(LESSON, task=replace(TASK, work_s=work_s)))
        later.work() if work_s == 36000 else None
    assert len(later.asked) == 1
    learning.tables(replace(LESSON, zones=2))
    assert len(later.asked) == 2
    later.work()
    learning.tables(replace(LESSON, zones=2, gpus=8))
    assert len(later.asked) == 3


def test_nobody_makes_tables_where_nobody_can():
    assert Learning(make=None, pool=Later()).tables(LESSON) is None
