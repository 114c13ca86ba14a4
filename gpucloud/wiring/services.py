"""Composes the services of one job: what supervising it needs, from outside, and on a machine that drives it itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucloud.adapters.home import Home
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.scripts import how_it_saves
from gpucloud.adapters.transfer.outputs import OutputsFolder, StoredOutputs, bring_stored_home
from gpucloud.adapters.transfer.sync import whole_code
from gpucloud.domain.errors import NodeError, StoreError, UsageError
from gpucloud.domain.job.code import LARGEST_CODE_BYTES, results_folder
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.job.spec import Job
from gpucloud.domain.market.learned import Lesson, Tables
from gpucloud.domain.node.bootstrap.wanted import ControllerWanted
from gpucloud.domain.supervision.budget import rules_for
from gpucloud.domain.supervision.self_driving import ORDER_VERSION, DriveOrder, Unable, order_key, parse_order, unable
from gpucloud.ports import Clock, DataSets, Shell
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.contract import CountingStore, Tally
from gpucloud.system.processes import last_line
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.services import OwnGroup, OwnProvisioner, Package, SelfBoot, Services
from gpucloud.wiring.clouds import Cloud, CloudProfile, market_of

if TYPE_CHECKING:
    from gpucloud.domain.state.state import JobState
    from gpucloud.ports import MarketData, NodeGroup, Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """What is composed already around a job: its cloud and store, the way to its nodes, and this user's folder.

    `key` is where its cluster's private SSH key is where it is here.
    """

    home: Home
    clock: Clock
    cloud: Cloud
    store: ObjectStore
    shell: Shell
    data_sets: DataSets | None
    key: Path

    @property
    def cache(self) -> Path:
        """What can be made again."""
        return self.home.root / "cache"


def compose_services(
    job: Job, name: str, environment: JobEnvironment, *, secrets: Mapping[str, str], unattended: timedelta | None = None
) -> Services:
    """Return everything that supervising a run of the job needs; with `unattended` its own machines are to drive it."""
    from gpucloud.adapters.keys import generate_key

    cloud, store, cloud_profile = environment.cloud, environment.store, environment.cloud.cloud_profile
    data, sha256 = package_zip()
    tally, has_key = Tally(), environment.key.is_file()

    def fetching(target: Path, **more: Any) -> OutputsFolder:
        return OutputsFolder(job.outputs, target, python=cloud_profile.node_python, **more)

    home = results_folder(job.source, name)
    earlier = partial(bring_stored_home, store, name, home, marks=True)

    def require_home() -> None:
        if not environment.home.has_folder_of(job.source):
            raise StoreError(f"{job.source} is not here", hint="run the command where it is")

    services = Services(
        job=job,
        name=name,
        clock=environment.clock,
        store=CountingStore(store, tally),
        tally=tally,
        provisioner=cloud.provisioner(store),
        group=cloud.group(store),
        market=market_of(cloud, job.cloud),
        shell=environment.shell,
        outputs=fetching(home, marks=True, earlier=earlier, require_home=require_home),
        stored_outputs=StoredOutputs(store, name, None, fetching),
        data_sets=environment.data_sets,
        public_key=generate_key(environment.key) if has_key else "",
        package=Package(data=data, sha256=sha256),
        rules=rules_for(job.checkpoint, unattended, cloud_profile.rules),
        terms=cloud_profile.terms,
        period_s=cloud_profile.period_s,
        flush_s=cloud_profile.flush_s,
        moved_to=cloud_profile.moved_to,
        power_off=cloud_profile.power_off,
        key=environment.key.read_bytes() if has_key else b"",
        secrets=secrets,
        self_boot=_self_boot(cloud_profile, unattended, environment.cache),
        make_tables=_make_tables,
        saving=how_it_saves(job).saving,
    )
    return services if unattended is None else _driven(services, environment)


def _make_tables(lesson: Lesson) -> Tables:
    """Return the learned policy's tables; NumPy is imported when some are made."""
    from gpucloud.adapters.markets.tables import TableMaker

    return TableMaker().tables(lesson.task, lesson.zones, lesson.gpus, lesson.spot_usd_per_hour)


def why_unable(job: Job, cloud_profile: CloudProfile, store: str, cache: Path) -> Unable | None:
    """Return why the job's machines cannot drive it, None if they can."""
    if cloud_profile.drives_as is None and not job.cloud.traits.owned:
        return Unable(why=f"machines on {job.cloud.value} do not drive their jobs", hint="leave --unattended out")
    found = unable(job, store, code_fits=True)
    if found is not None:
        return found
    code = whole_code(job.code, limit=LARGEST_CODE_BYTES, cache=cache).packed
    return unable(job, store, code_fits=code is not None)


def _self_boot(cloud_profile: CloudProfile, unattended: timedelta | None, cache: Path) -> SelfBoot | None:
    login = cloud_profile.boots_as or (cloud_profile.drives_as if unattended is not None else None)
    if login is None:
        return None
    return SelfBoot(login=login, pack_code=partial(whole_code, cache=cache))


def _driven(services: Services, environment: JobEnvironment) -> Services:
    """Return the services with what its machines go by; what the store adds to the order is added there."""
    order = DriveOrder(
        version=ORDER_VERSION,
        name=services.name,
        cluster=services.cluster,
        group="",
        job=services.job,
        store=services.store.url,
        region=None,
        tree="",
        tree_name="",
        package="",
        package_sha256="",
        rules=services.rules,
        terms=services.terms,
        period_s=services.period_s,
        flush_s=services.flush_s,
        node_python=environment.cloud.cloud_profile.node_python,
        power_off=services.power_off,
        records=str(environment.home.cloud) if services.job.cloud is CloudName.LOCAL else "",
        key=services.key,
    )
    controller = ControllerWanted(
        store=order.store, order=order_key(order.cluster), pip_mirror=services.job.mirrors.pip
    )
    return replace(services, order=order, controller=controller)


# A machine that drives its own job: the same supervisor, with what a machine may reach.


_PERIODS_S = {CloudName.LOCAL: 0.5}
_PERIOD_S = 5.0
"""How often a driver looks whether somebody else drives: in S3 each look is a paid request (0.0000004 USD)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This node as one that can drive; `root` is the agent's folder, `wanted` says where its order is."""

    root: Path
    wanted: ControllerWanted

    @property
    def clock(self) -> Clock:
        """This machine's clock."""
        return SystemClock()

    @property
    def store(self) -> ObjectStore:
        """The job's store."""
        return open_store(self.wanted.store)

    def order(self) -> DriveOrder | None:
        """Return what is to be driven, None when that was withdrawn. Raises StoreError, Malformed."""
        stored = self.store.get(self.wanted.order)
        return parse_order(stored.data) if stored is not None else None

    def period_s(self, order: DriveOrder) -> float:
        """Return how many seconds may lie between two looks at who drives."""
        return _PERIODS_S.get(order.job.cloud, _PERIOD_S)

    def services(self, order: DriveOrder) -> Services:
        """Return everything that supervising the job from here needs. Raises NodeError, StoreError."""
        from gpucloud.adapters.keys import generate_key
        from gpucloud.adapters.ssh.shell import SshShell

        key, tally = self._key(order), Tally()
        package = Path(sys.argv[0]).read_bytes()
        job = replace(order.job, code=self._code(order))
        return Services(
            job=job,
            name=order.name,
            clock=SystemClock(),
            store=CountingStore(self.store, tally),
            tally=tally,
            provisioner=OwnProvisioner(order.group),
            group=self.group(order),
            market=self._market(order),
            shell=SshShell(key, python=order.node_python, cache=self._folder / "cache"),
            outputs=self._outputs(order),
            data_sets=self._data_sets(order),
            public_key=generate_key(key),
            package=Package(data=package, sha256=order.package_sha256),
            rules=order.rules,
            terms=order.terms,
            period_s=order.period_s,
            flush_s=order.flush_s,
            power_off=order.power_off,
            key=order.key,
            controller=self.wanted,
            on_machine=True,
            saving=how_it_saves(job).saving,
        )

    def group(self, order: DriveOrder) -> NodeGroup:
        """Return the job's own group, as far as its machines may do anything about it."""
        match order.job.cloud:
            case CloudName.LOCAL:
                from gpucloud.adapters.local.group import LocalNodeGroup
                from gpucloud.domain.node.node import fleet_of

                named = fleet_of(order.group)
                fleet = None if named is None else lambda: named
                return OwnGroup(LocalNodeGroup(Path(order.records), fleet=fleet), order.group)
            case CloudName.AWS:
                from gpucloud.wiring.aws import own_nodes

                return OwnGroup(own_nodes(order, self.store), order.group)
            case CloudName.SSH:
                raise _cannot(order)

    def end_group(self, order: DriveOrder, state: JobState) -> None:
        """Have every machine of the group end, this one too; the free parts stay for a command from outside."""
        self.group(order).resize(order.group, 0, state.pool)

    @property
    def _folder(self) -> Path:
        return self.root / "drive"

    def _market(self, order: DriveOrder) -> MarketData:
        match order.job.cloud:
            case CloudName.LOCAL:
                from gpucloud.adapters.local.market import LocalMarket

                return LocalMarket()
            case CloudName.AWS:
                from gpucloud.wiring.aws import own_market

                return own_market(order)
            case CloudName.SSH:
                raise _cannot(order)

    def _outputs(self, order: DriveOrder) -> Outputs:
        def fetching(target: Path) -> Outputs:
            return OutputsFolder(order.job.outputs, target, python=order.node_python)

        return StoredOutputs(self.store, order.name, self._folder / "outputs", fetching)

    def _data_sets(self, order: DriveOrder) -> DataSets | None:
        if not order.job.data:
            return None
        from gpucloud.adapters.transfer.sync import Sources

        return Sources(profile=None, python=order.node_python, cache=self._folder / "cache")

    def _key(self, order: DriveOrder) -> Path:
        path = self._folder / "key"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(order.key)
        return path

    def _code(self, order: DriveOrder) -> Path:
        """Return the job's code as it was started: what runs on this node writes into a copy of its own."""
        stored = self.store.get(order.tree)
        if stored is None:
            raise NodeError(f"{order.tree} is not in the store", hint=f"gpucloud train {order.name}")
        target = self._folder / "code"
        argv = (sys.executable, "-I", sys.argv[0], "code", str(target), order.tree_name)
        done = subprocess.run(argv, input=stored.data, capture_output=True, check=False)
        if done.returncode != 0:
            why = last_line(done.stderr)
            raise NodeError(f"the code in the store is not whole: {why}", hint=f"gpucloud train {order.name}")
        return target / order.tree_name


def _cannot(order: DriveOrder) -> UsageError:
    return UsageError(f"machines on {order.job.cloud.value} do not drive their jobs", hint="gpucloud train goes on")
