"""A whole gpucloud over fakes: what outlives a process, and the composition of each process over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpucloud.adapters.home import Home
from gpucloud.adapters.jobfile import read_job
from gpucloud.adapters.local.market import Devices, LocalMarket
from gpucloud.domain.errors import ProvisionError, StoreError
from gpucloud.domain.job.spec import Job
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.node import GroupView, Node
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.order import opened
from gpucloud.domain.supervision.snapshot import DriveTrial, Rules
from gpucloud.ports import Brought, ClusterSpec
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.services import Package, Services
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.clouds import CloudProfile
from tests.fakes.agent import FakeFleet, Training
from tests.fakes.clock import JumpingClock
from tests.fakes.fleet_shell import FleetShell
from tests.fakes.node_group import FakeNodeGroup
from tests.fakes.provisioner import FakeProvisioner
from tests.faults.happenings import WatchedStore
from tests.faults.strikes import Counted, Strikes

JOB = "small"
GROUP = f"gpucloud-{JOB}"
JOB_FILE = """\
name: small
run: train.py
resources: {nodes: 2}
budget: 1 USD
"""
HOST = ("run", "sync")
_ABOUT_TIME = (f"group.arm {GROUP}", f"store.put jobs/{JOB}/state.json")


class RecordedGroup(FakeNodeGroup):
    """A node group whose nodes are remembered when it is gone, as the cloud's own bill remembers them."""

    def __init__(self, clock: JumpingClock) -> None:
        super().__init__(clock, notice_s=4.0, boot_s=1.0)
        self.removed: list[Node] = []
        self.removed_of: dict[str, tuple[Node, ...]] = {}

    def remove(self, group: str) -> None:
        nodes = self.describe(group).nodes
        self.removed += nodes
        self.removed_of[group] = (*self.removed_of.get(group, ()), *nodes)
        super().remove(group)

    def launched_for(self, group: str) -> tuple[Node, ...]:
        """Every node that ever was in the group."""
        return (*self.removed_of.get(group, ()), *self.describe(group).nodes)

    @property
    def launched(self) -> tuple[Node, ...]:
        """Every node that ever was."""
        return (*self.removed, *self.describe(GROUP).nodes)


class GroupProvisioner(FakeProvisioner):
    """A provisioner that makes the groups of a fake cloud; it removes none that has machines."""

    def __init__(self, cloud: RecordedGroup) -> None:
        super().__init__()
        self._cloud = cloud

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        return self._cloud.create(super().ensure(spec, story=story))

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        if self._cloud.describe(group).alive:
            raise ProvisionError(f"{group} has machines", hint="end them first")
        super().destroy(group, story=story)
        if self._cloud.describe(group).exists:
            self._cloud.remove(group)


class NoOutputs:
    """Implements `Outputs` for a job that has none."""

    def bring_home(self, host: object, code: str, attempt: int, moves: object = None, *_: object) -> Brought:
        del host, code, moves
        return Brought()

    def note(self, *_: object) -> None:
        pass

    def came(self, *_: object) -> None:
        pass

    def bring_profile(self, host: object, attempt: int) -> tuple[str, ...]:
        del host, attempt
        return ()


@dataclass
class Outside:
    """Everything that a process finds there and leaves behind. `breaches` are moments at which nothing was armed.

    `refused` is why the machines may not drive the job, None where they may.
    """

    folder: Path
    training: Training = field(default_factory=Training)
    breaches: list[str] = field(default_factory=list)
    looks: int = 0
    refused: str | None = None
    _tried: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        self.clock = JumpingClock()
        self.store = WatchedStore(self.clock)
        self.cloud = RecordedGroup(self.clock)
        self.provisioner = GroupProvisioner(self.cloud)
        self.fleet = FakeFleet(self.clock, self.cloud, self.store, self.training)
        self.shell = FleetShell(self.fleet, self.cloud, GROUP)
        self.market = LocalMarket(now=self.clock.now, devices=lambda: Devices(uuids=()))
        self.home = Home(self.folder / "home")
        self.file = self.folder / "project" / f"{JOB}.yaml"  # beside home, which is no code
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(JOB_FILE)
        (self.file.parent / "train.py").touch()
        for code in (self.file, self.file.parent / "train.py"):
            os.utime(code, (0, 0))  # a tree of the same bytes in every run is made once (process.Trees)
        self.job = read_job(self.file)

    def pass_by(self, seconds: float) -> None:
        """Let time pass while nobody looks on."""
        self.clock.sleep(seconds)
        self.fleet.live(GROUP)

    def look(self, call: str) -> None:
        """Note a breach: machines that are there, or asked for, with no shut-off ahead."""
        self.looks += 1
        view: GroupView = self.cloud.describe(GROUP)
        armed = view.armed_until is not None and view.armed_until > self.clock.now()
        if (view.alive or view.size) and not armed:
            self.breaches.append(f"{call}: {len(view.alive)} machines, {view.size} asked for, {view.armed_until}")
        self._have_tried(view)
        if call in _ABOUT_TIME and view.exists:
            promised = None
            with suppress(StoreError):  # what machines wrote may be no state
                loaded = JobStore(self.store, JOB).load()
                promised = loaded[0].paid_until if loaded is not None else None
            if promised is not None and (view.armed_until is None or promised > view.armed_until):
                self.breaches.append(f"{call}: {promised} is promised, and the cloud ends them at {view.armed_until}")

    def _have_tried(self, view: GroupView) -> None:
        """Have every machine say whether it may drive the job, as its driver does under each order."""
        stored = self.store.get(f"jobs/{JOB}/control/order.json") if view.alive else None
        now = (stored.version if stored is not None else "", self.refused, *(node.id for node in view.alive))
        if stored is None or now == self._tried:
            return
        self._tried, jobs = now, JobStore(self.store, JOB)
        with suppress(StoreError, ValueError):  # an order may be damaged, or of another version
            found = jobs.order()
            number = opened(found[0]).number if found is not None else 0
            for node in view.alive:
                jobs.keep_trial(node.id, DriveTrial(number=number, refused=self.refused))

    def over(self, strikes: Strikes) -> Rigged:
        """Return the composition of one process, every call of it counted by `strikes`."""
        strikes.look = self.look
        return Rigged(self, strikes)


class _Cloud:
    """Implements `Cloud` over the fakes."""

    cloud_profile = CloudProfile(rules=Rules(), terms=Terms(), period_s=1.0, flush_s=2.0)

    def __init__(self, outside: Outside, strikes: Strikes) -> None:
        self._outside, self._strikes = outside, strikes

    def account(self) -> None:
        """Nobody asks."""

    def billing(self) -> None:
        """Return what sends a bill: nobody."""

    def market(self) -> Any:
        return Counted(self._strikes, "market", self._outside.market, ("offers", "prices"))

    def group(self, store: object) -> Any:
        del store
        changes = ("arm", "resize", "relieve", "terminate", "purge", "interrupt")
        return Counted(self._strikes, "group", self._outside.cloud, ("describe", *changes))

    def provisioner(self, store: object) -> Any:
        del store
        return Counted(self._strikes, "provisioner", self._outside.provisioner, ("ensure", "destroy"))

    def default_store(self) -> str:
        return self._outside.store.url

    def store_is_there(self) -> bool:
        return True

    def make_store(self) -> None:
        """It is there."""

    def remarks(self, offer: Offer) -> tuple[str, ...]:
        return ()


class Rigged(Gpucloud):
    """gpucloud as one process composes it, over an `Outside`."""

    def __init__(self, outside: Outside, strikes: Strikes) -> None:
        super().__init__(Home(outside.folder / "home"))
        self.home = Counted(strikes, "home", outside.home, ("remember", "find"))
        self.clock = Counted(strikes, "clock", outside.clock, ("sleep",))
        self._outside, self._strikes = outside, strikes

    def local(self) -> Any:
        return _Cloud(self._outside, self._strikes)

    def store(self, job: Job) -> Any:
        del job
        return Counted(self._strikes, "store", self._outside.store, ("get", "put", "list", "delete"))

    def store_of(self, known: object) -> Any:
        del known
        return self.store(self._outside.job)

    def read_job(self, path: Path, *, to_start: bool = False) -> Job:
        del path, to_start
        return self._outside.job

    def signer(self) -> Any:
        return None

    def machine_key(self, known: object) -> Path | None:
        """Nobody logs in with one."""
        del known
        return None

    def reader(self) -> Any:
        """Nobody verifies, for nobody signs."""
        return None

    def services(self, job: Job, name: str, *, goes_on: bool = True, unattended: Any = None) -> Services:
        del goes_on, unattended
        cloud, store = self.local(), self.store(job)
        shell: Any = Counted(self._strikes, "shell", self._outside.shell, ("host",), {"host": HOST})
        return Services(
            job=job,
            name=name,
            clock=self.clock,
            store=store,
            provisioner=cloud.provisioner(store),
            group=cloud.group(store),
            market=cloud.market(),
            shell=shell,
            outputs=NoOutputs(),
            public_key="ssh-ed25519 AAAA",
            package=Package(data=b"zip", sha256="5" * 64),
            rules=cloud.cloud_profile.rules,
            terms=cloud.cloud_profile.terms,
            period_s=cloud.cloud_profile.period_s,
            flush_s=cloud.cloud_profile.flush_s,
            key=b"key",
        )


AWAY = timedelta(minutes=45).total_seconds()
"""Longer than any prepaid horizon: whatever was left then has ended."""
