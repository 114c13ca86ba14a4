"""Composes the services of one job: what supervising it needs, and what its machines need to drive it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from gpucloud.adapters.home import Home
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.scripts import how_it_saves
from gpucloud.adapters.ssh.keys import generate_key
from gpucloud.adapters.transfer.outputs import OutputsFolder, StoredOutputs
from gpucloud.adapters.transfer.sync import whole_code
from gpucloud.domain.job.code import LARGEST_CODE_BYTES
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.job.spec import Job
from gpucloud.domain.market.learned import Tables
from gpucloud.domain.node.bootstrap.wanted import ControllerWanted
from gpucloud.domain.supervision.deadline import Lesson
from gpucloud.domain.supervision.self_driving import ORDER_VERSION, DriveOrder, Unable, order_key, unable
from gpucloud.domain.supervision.snapshot import rules_for
from gpucloud.ports import Clock, DataSets, Shell
from gpucloud.store import ObjectStore
from gpucloud.store.contract import CountingStore, Tally
from gpucloud.usecases.services import Package, SelfBoot, Services
from gpucloud.wiring.clouds import Cloud, CloudProfile


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
    cloud, store, cloud_profile = environment.cloud, environment.store, environment.cloud.cloud_profile
    data, sha256 = package_zip()
    tally, has_key = Tally(), environment.key.is_file()

    def fetching(target: Path, *, marks: bool = False) -> OutputsFolder:
        return OutputsFolder(job.outputs, target, python=cloud_profile.node_python, marks=marks)

    services = Services(
        job=job,
        name=name,
        clock=environment.clock,
        store=CountingStore(store, tally),
        tally=tally,
        provisioner=cloud.provisioner(store),
        group=cloud.group(store),
        market=cloud.market(),
        shell=environment.shell,
        outputs=fetching(job.source.parent / "outputs" / name, marks=True),
        stored_outputs=StoredOutputs(store, name, None, fetching),
        data_sets=environment.data_sets,
        public_key=generate_key(environment.key) if has_key else "",
        package=Package(data=data, sha256=sha256),
        rules=rules_for(unattended, cloud_profile.rules),
        terms=cloud_profile.terms,
        period_s=cloud_profile.period_s,
        flush_s=cloud_profile.flush_s,
        knows_our_address=cloud_profile.knows_our_address,
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
    code = whole_code(job.code, limit=LARGEST_CODE_BYTES, cache=cache)[1]
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
