"""The simulator itself: blocking code takes turns, dies and pauses, and the same seed gives the same run."""

from __future__ import annotations

from gpucloud.domain.node.node import EndCause
from gpucloud.domain.state.state import ExitReason
from tests.sim import setting
from tests.sim.loom import Killed, Loom, Process
from tests.sim.runs import verdict
from tests.sim.training import Script
from tests.sim.world import Run


def test_processes_take_turns_where_they_wait():
    loom, said = Loom(), []

    def work(name, pause_s):
        for _ in range(2):
            loom.sleep(pause_s)
            said.append((name, loom.now))

    for name, pause_s in (("a", 2.0), ("b", 3.0)):
        loom.spawn(Process(loom, name), lambda name=name, pause_s=pause_s: work(name, pause_s))
    loom.run(10)

    assert said == [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0)]


def test_a_killed_process_does_nothing_more_and_its_cleanup_reaches_nothing():
    loom, said = Loom(), []
    process = Process(loom, "p")

    def work():
        try:
            loom.sleep(5)
            said.append("worked")
        finally:
            try:
                process.call(0.1)
                said.append("reached something")
            except Killed:
                said.append("reached nothing")

    loom.spawn(process, work)
    loom.at(2, process.kill)
    loom.run(10)

    assert said == ["reached nothing"]


def test_a_paused_process_goes_on_later():
    loom, said = Loom(), []
    process = Process(loom, "p")
    loom.spawn(process, lambda: (loom.sleep(1), said.append(loom.now)))
    loom.at(0.5, lambda: process.pause(20))
    loom.run(30)

    assert said == [20.5]


def test_the_same_seed_gives_the_same_run():
    first, second = verdict(3, setting.taken_machines), verdict(3, setting.taken_machines)

    assert first == second
    assert first.wrong == []


def test_a_machine_that_froze_while_nobody_supervised_is_given_up_and_replaced(tmp_path):
    script = Script(steps=200, step_s=1.0, start_s=2.0, every=10, save_s=1.0)
    run = Run(1, setting.Setting(nodes=2, budget_usd=setting.hours(4, 2), script=script), tmp_path)

    def strike():
        for process in run.processes.values():
            process.kill()
        run.machines["i-0002"].frozen = True

    run.loom.at(100, strike)
    found = run.run()

    assert found.wrong == []
    assert (found.reason, found.attempts, found.machines) == (ExitReason.SUCCEEDED, 2, 3)


def test_a_step_that_a_machine_committed_in_its_last_moment_is_in_the_books(tmp_path):
    script = Script(steps=30, step_s=1.0, start_s=2.0, every=10, save_s=1.0)
    run = Run(1, setting.Setting(nodes=1, budget_usd=setting.hours(4, 1), script=script), tmp_path)

    def strike(commit):
        run.committed = commit
        if len(run.machines) == 1:
            run.cloud.strike("i-0001", EndCause.CRASH)

    run._committed = strike
    found = run.run()

    assert found.wrong == []
    assert [attempt.saved_step for attempt in run.state().attempts] == [10, 30]
