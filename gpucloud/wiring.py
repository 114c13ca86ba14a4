"""The one composition root: job and environment in, adapters out. Late imports live here, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.home import Home, KnownJob, open_home
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Job
from gpucloud.domain.prepaid import Wall
from gpucloud.domain.seen import Limits, Rules
from gpucloud.store import ObjectStore, open_store

if TYPE_CHECKING:
    from gpucloud.adapters.local.group import LocalNodeGroup
    from gpucloud.ports import MarketData, Provisioner, Shell
    from gpucloud.usecases.jobs import Asker
    from gpucloud.usecases.start import Starter
    from gpucloud.usecases.world import World

__all__ = ["Gpucloud", "Home", "KnownJob", "job_schema", "read_secrets", "sample_job"]

RULES = Rules(wall=Wall(), limits=Limits(save=timedelta(seconds=60)))
_TICK_S = 0.1


class Gpucloud:
    """gpucloud of this user on this machine: everything that a command needs, made when it is asked for."""

    def __init__(self, home: Home | None = None) -> None:
        self.home = home or open_home()
        self.clock = SystemClock()

    def store(self, url: str | None) -> ObjectStore:
        """Return the store that a job names, else this user's own."""
        return open_store(url or self.home.store)

    def market(self) -> MarketData:
        """Return the embedded cloud's prices."""
        from gpucloud.adapters.local.market import LocalMarket

        return LocalMarket()

    def group(self) -> LocalNodeGroup:
        """Return the embedded cloud's node groups."""
        from gpucloud.adapters.local.group import LocalNodeGroup

        return LocalNodeGroup(self.home.cloud)

    def provisioner(self) -> Provisioner:
        """Return Terraform where it is installed, else the function that its module calls."""
        from gpucloud.adapters.bundled import bundled
        from gpucloud.adapters.local.provision import EmbeddedProvisioner, LocalProvisioner
        from gpucloud.adapters.terraform import TerraformProvisioner, find_terraform

        direct, terraform = LocalProvisioner(self.home.cloud), None
        if find_terraform() is not None:
            env = {**os.environ, "GPUCLOUD_HOME": str(self.home.root)}
            terraform = TerraformProvisioner(bundled("terraform", "local"), self.home.terraform, env)
        return EmbeddedProvisioner(direct, terraform, self.home.terraform)

    def shell(self, job: str) -> Shell:
        """Return SSH with the key of the job's cluster."""
        from gpucloud.adapters.ssh import SshShell

        return SshShell(self.home.key(job), python=sys.executable, cache=self.home.root / "cache")

    def starter(self, job: Job) -> Starter:
        """Return what starts jobs in the job's store."""
        from gpucloud.usecases.start import Starter

        return Starter(store=self.store(job.store), market=self.market(), clock=self.clock, wall=RULES.wall)

    def asker(self, known: KnownJob) -> Asker:
        """Return what answers questions about a known job."""
        from gpucloud.usecases.jobs import Asker
        from gpucloud.usecases.jobstore import JobStore

        jobs = JobStore(self.store(known.store), known.name)
        return Asker(jobs=jobs, market=self.market(), group=self.group(), clock=self.clock)

    def world(self, job: Job, name: str, *, with_secrets: bool = True) -> World:
        """Return everything that supervising a run of the job needs. UsageError for a secret that is not set.

        Ending a job needs no secrets.
        """
        from gpucloud.adapters.outputs import OutputsFolder
        from gpucloud.adapters.package import package_zip
        from gpucloud.adapters.ssh import generate_key
        from gpucloud.usecases.bootstrap import Package
        from gpucloud.usecases.world import World

        data, sha256 = package_zip()
        return World(
            job=job,
            name=name,
            clock=self.clock,
            store=self.store(job.store),
            provisioner=self.provisioner(),
            group=self.group(),
            market=self.market(),
            shell=self.shell(name),
            outputs=OutputsFolder(job.outputs, job.source.parent / "outputs" / name),
            public_key=generate_key(self.home.key(name)),
            package=Package(data=data, sha256=sha256),
            rules=RULES,
            period_s=_TICK_S,
            secrets=read_secrets(job) if with_secrets else {},
        )

    def read_job(self, path: Path) -> Job:
        """Return the job of a job file. JobFileError with everything that is wrong."""
        from gpucloud.adapters.jobfile import read_job

        return read_job(path)

    def remarks(self) -> tuple[str, ...]:
        """Return what is emulated, or done in another way than users might think."""
        from gpucloud.adapters.terraform import find_terraform

        seconds = self.group().notice_seconds
        emulated = f"embedded fleet: nodes are processes of this machine; a notice of 120 s runs as {seconds:g} s"
        without = "Terraform is not on PATH: the embedded fleet's group is made without it"
        return (emulated,) if find_terraform() else (emulated, without)

    def leftovers(self, name: str) -> tuple[str, ...]:
        """Return what the cloud still lists for a job: its group, and nodes alive in it."""
        from gpucloud.usecases.world import cluster_of

        listed = self.group().describe(cluster_of(name))
        return (f"group {cluster_of(name)}", *(node.id for node in listed.alive)) if listed.exists else ()


def sample_job(name: str) -> str:
    """Return the commented job file that `gpucloud init` writes."""
    from gpucloud.adapters import jobfile

    return jobfile.sample_job(name)


def job_schema() -> dict[str, object]:
    """Return the JSON Schema of job files."""
    from gpucloud.adapters import jobfile

    return jobfile.json_schema()


def read_secrets(job: Job) -> dict[str, str]:
    """Return the values of the job's secrets from the caller's environment."""
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UsageError(f"secrets: {', '.join(missing)} not set in the environment", hint=f"export {missing[0]}=…")
    return {name: os.environ[name] for name in job.secrets}
