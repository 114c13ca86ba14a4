"""No machine outlives the time that is paid for, whatever fails on our side and whatever runs on the machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpucloud.adapters.aws.machine import POWER_OFF
from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
from gpucloud.adapters.aws.nodes.listing import AUTO_SHUTDOWN, AUTO_SHUTDOWN_AGAIN
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.home import bundled
from gpucloud.agent.attempt.decide import OwnEnd
from gpucloud.agent.daemon import Agent
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.node.status import Desired, Stop, desired_to_json
from tests.commandline import until
from tests.lab.aws import Lab
from tests.prove.goal import Figure, Form, Goal
from tests.standins.aws_group import CLUSTER, GROUP, ON_DEMAND, SPOT, Rig, rented

_PAID_S = 600.0
_EARLY_S = 20.0
_LATE_S = 150.0
_PATIENCE_S = 20.0
Hole = Callable[["_Case"], None]


class _Case:
    """One group with two machines, paid for ten minutes of the emulation's time."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.nodes = lab, Rig(lab).group()
        self.scaling, self.group = lab.client("autoscaling"), {"AutoScalingGroupName": CLUSTER}
        self.arm()
        self.nodes.resize(GROUP, 2, SPOT)

    def arm(self) -> None:
        self.nodes.arm(GROUP, _now() + timedelta(seconds=_PAID_S))

    def alive(self) -> int:
        return sum(instance.state in ("pending", "running") for instance in self.lab.world.instances())

    def pass_by(self, seconds: float) -> None:
        with self.lab.world.lock:
            for backend in self.lab.world.scaling():
                for action in backend.scheduled_actions.values():
                    action.start_time -= timedelta(seconds=seconds)
        self.lab.world.kick.set()

    def goes(self) -> bool:
        deadline = time.monotonic() + _PATIENCE_S
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _protect(case: _Case) -> None:
    case.scaling.update_auto_scaling_group(**case.group, NewInstancesProtectedFromScaleIn=True)
    case.scaling.set_desired_capacity(**case.group, DesiredCapacity=1)
    case.scaling.set_desired_capacity(**case.group, DesiredCapacity=2)
    case.arm()


def _suspend(case: _Case) -> None:
    case.scaling.suspend_processes(**case.group, ScalingProcesses=["ScheduledActions", "Terminate"])
    case.arm()


def _change_market(case: _Case) -> None:
    case.nodes.resize(GROUP, 3, ON_DEMAND)


def _power_off(case: _Case) -> None:
    case.lab.power_off(next(i.id for i in case.lab.world.instances() if i.state in ("pending", "running")))


def _fake_notice(case: _Case) -> None:
    """Code on a machine says that it is being taken: another one is started beside it, and it is still there."""
    case.nodes.relieve(GROUP, next(node.id for node in case.nodes.describe(GROUP).counted))


def _late_raise(case: _Case) -> None:
    """A supervisor that slept between its check and its call raises the group when the shut-off has fired."""
    case.pass_by(_PAID_S + 1)
    case.goes()
    case.scaling.update_auto_scaling_group(**case.group, MaxSize=2, DesiredCapacity=2)


_OURS: tuple[Hole, ...] = (_change_market, _late_raise)
_HOSTILE: tuple[Hole, ...] = (_protect, _suspend, _power_off, _fake_notice)
_HOLES = (*_HOSTILE, *_OURS)


def _by_schedule(case: _Case, holes: tuple[Hole, ...]) -> list[str]:
    for hole in holes:
        hole(case)
    if _late_raise in holes:
        case.pass_by(_LATE_S + 151)
        return [] if case.goes() else ["alive after the shut-off that recurs"]
    before = case.alive()
    case.pass_by(_PAID_S - _EARLY_S)
    time.sleep(0.1)
    early = ["ended before the paid time"] if case.alive() < min(before, 2) else []
    case.pass_by(_EARLY_S + 1)
    return early + ([] if case.goes() else ["alive after the shut-off"])


def _by_machine(case: _Case, machine: _Machine, off: Callable[[], None]) -> list[str]:
    """The schedule was removed; what ends machines is what each does by itself: lower the group, then power off."""
    for name in (AUTO_SHUTDOWN, AUTO_SHUTDOWN_AGAIN):
        case.scaling.delete_scheduled_action(**case.group, ScheduledActionName=name)
    try:
        machine.off.unlink(missing_ok=True)
        off()
        until(machine.off.exists, "a machine that powers itself off", limit_s=_PATIENCE_S)
    except AssertionError as error:
        return [str(error)]
    for instance in [i for i in case.lab.world.instances() if i.state in ("pending", "running")]:
        case.lab.power_off(instance.id)
    gone = case.goes()
    time.sleep(0.2)  # a group whose level stood would start others in their place
    return [] if gone and not case.alive() else ["replaced after it powered itself off"]


def _sleeps(case: _Case) -> list[str]:
    """A supervisor sleeps between its check of the time and its call, until the shut-off has fired, and then calls."""
    aws = _SleepingAws(lambda: (case.pass_by(_PAID_S + 1), case.goes()))
    nodes = AwsNodeGroup(**Rig(case.lab, aws).arguments(), sleep=lambda wait_s: time.sleep(wait_s / 100))
    try:
        nodes.resize(GROUP, 3, SPOT)
    except ProvisionError:
        told = True
    else:
        told = False
    unsaid = [] if told else ["what was started after the shut-off is not said"]
    return unsaid + ([] if case.goes() else ["alive after a call that came late"])


def _refuses(case: _Case) -> list[str]:
    """Nothing is started with too little time ahead, nor behind a shut-off that cannot end it."""
    wrong = []
    case.pass_by(_PAID_S - 100)
    try:
        case.nodes.resize(GROUP, 3, SPOT)
        wrong.append("started with 100 s ahead")
    except ProvisionError:
        pass
    case.pass_by(101)
    return wrong + ([] if case.goes() else ["alive after the shut-off"])


def _lags(case: _Case) -> list[str]:
    """AWS runs the schedule two minutes late: nothing ends before its time, and nothing outlives it by more."""
    case.lab.world.shutdown_lag_s = _LATE_S - 30
    try:
        case.pass_by(_PAID_S - _EARLY_S)
        time.sleep(0.1)
        early = [] if case.alive() == 2 else ["ended before the paid time"]
        case.pass_by(_EARLY_S + _LATE_S - 29)
        return early + ([] if case.goes() else ["alive after a shut-off that came late"])
    finally:
        case.lab.world.shutdown_lag_s = 0.0


class _SleepingAws(Aws):
    """Sleeps once, before the call that sets a group's size."""

    def __init__(self, sleep: Callable[[], object]) -> None:
        super().__init__()
        self._sleeps = [sleep]

    @contextlib.contextmanager
    def calling(self, service: str, what: str, region: str | None = None) -> Iterator[Any]:
        if what.startswith("set the size of") and self._sleeps:
            self._sleeps.pop()()
        with super().calling(service, what, region) as client:
            yield client


_SCRIPT = """
import importlib.util, os, sys

spec = importlib.util.spec_from_file_location("first_boot", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
keys = {"AccessKeyId": os.environ["AWS_ACCESS_KEY_ID"], "SecretAccessKey": os.environ["AWS_SECRET_ACCESS_KEY"]}
script.own_keys = lambda: (keys, "i-1")
sys.exit(getattr(script, sys.argv[2])(*sys.argv[3:]))
"""


class _Machine:
    """What a machine has to end itself: the script of its first boot, an agent, and `sudo` and `shutdown` of its own.

    Only whose keys they are is told to it: what it asks of AWS goes to the emulation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.off = folder, folder / "off"
        (folder / "agent").mkdir(parents=True)
        (folder / "machine.py").write_text(_SCRIPT, encoding="utf-8")
        self._put("sudo", 'exec "$@"')
        self._put("shutdown", f': >"{self.off}"')
        self._put("end", f'exec {shlex.join(self._words("end"))} "$@"')
        self._env = {"PATH": f"{folder}:{os.environ['PATH']}", "GPUCLOUD_BOOT_DIR": str(folder), "HOME": str(folder)}

    def by_timer(self) -> None:
        """Its agent was told until when it is paid, a minute ago and before that; nobody else does anything."""
        env = ["env", *(f"{name}={value}" for name, value in self._env.items())]
        node_metrics: Any = SimpleNamespace(
            gpus=(), unhealthy=None, host=None, spared=frozenset(), look=lambda *_: None
        )
        end = OwnEnd(argv=(*env, *POWER_OFF), after=timedelta(seconds=60))
        agent = Agent(self._folder, notice=lambda: None, own_end=end, rest=lambda _: None, node_metrics=node_metrics)
        for ago_s in (-60, 30, 61):
            time.sleep(0.1)
            assert not self.off.exists(), "powered off before the cloud's own schedule had its time"
            wanted = Desired(epoch=1, launch=None, stop=Stop.NO, paid_until=_now() - timedelta(seconds=ago_s))
            (self._folder / "agent" / "desired.json").write_text(desired_to_json(wanted), encoding="utf-8")
            agent.tick()

    def by_dead_man(self) -> None:
        """No supervisor ever came, and it has no agent."""
        words = self._words("watch_for_agent")
        subprocess.run(words, env={**os.environ, **self._env, "GPUCLOUD_DEAD_MAN_S": "0.2"}, check=True)

    def _words(self, call: str) -> tuple[str, ...]:
        script = str(bundled("templates", "node", "first_boot.py"))
        return sys.executable, str(self._folder / "machine.py"), script, call, "s3://absent", CLUSTER, "us-east-1"

    def _put(self, name: str, text: str) -> None:
        (self._folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (self._folder / name).chmod(0o700)


def _cases(form: Form) -> list[tuple[Hole, ...]]:
    """None and each alone; in the long form all pairs, and the triples in which failures of ours meet hostile ones."""
    most = 1 if form is Form.SHORT else 3
    cases = [holes for count in range(most + 1) for holes in itertools.combinations(_HOLES, count)]
    return [holes for holes in cases if len(holes) < 3 or set(holes) & set(_OURS)]


def run(form: Form) -> Iterator[Figure]:
    """Open each hole, and in the long form pairs and triples of them, and look what is alive at the wall."""
    wrong, count = [], 0
    with tempfile.TemporaryDirectory() as folder, rented(Path(folder) / "lab") as lab:
        machine = _Machine(Path(folder) / "machine")
        stories: list[tuple[str, Callable[[_Case], list[str]]]] = [
            (" ".join(hole.__name__ for hole in holes), lambda case, holes=holes: _by_schedule(case, holes))  # type: ignore[misc]
            for holes in _cases(form)
        ]
        stories += [
            (off.__name__, lambda case, off=off: _by_machine(case, machine, off))  # type: ignore[misc]
            for off in (machine.by_timer, machine.by_dead_man)
        ]
        stories += [("refuses", _refuses), ("lags", _lags), ("sleeps", _sleeps)]
        for name, story in stories:
            began = time.monotonic()
            try:
                case = _Case(lab)
                found = story(case)
                _purged(case.nodes, lab)
            except ProvisionError as error:  # what one story left behind may keep the next from its machines
                found = [f"it could not be told: {error}"]
            wrong += [f"{name or 'nothing'}: {one}" for one in found]
            count += 1
            if form is Form.LONG:
                sys.stderr.write(f"wall: {count} of {len(stories)}, {name}: {time.monotonic() - began:.1f} s\n")
    for line in wrong:
        sys.stderr.write(f"wall: {line}\n")
    yield Figure(name="wall", value=len(wrong), limit=0)
    yield Figure(name="wall.stories", value=count, limit=len(stories), least=True)


def _purged(nodes: AwsNodeGroup, lab: Lab) -> None:
    scaling: Any = lab.client("autoscaling")
    scaling.resume_processes(AutoScalingGroupName=CLUSTER, ScalingProcesses=["ScheduledActions", "Terminate"])
    nodes.purge(GROUP)


def _now() -> datetime:
    return datetime.now(timezone.utc)


GOAL = Goal(
    promise="no machine is alive 150 s after its paid time, and none ends before it, whatever hole is opened",
    real="the node group's adapter, every call of its; an agent's timer and the dead man of a first boot, each alone",
    simulated="AWS is the strict emulation: its schedules honour protection and suspended processes; time is moved on",
    run=run,
)
