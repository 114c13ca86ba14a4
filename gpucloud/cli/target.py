"""What a command is about: a job's name, or a file; with neither, `gpucloud.yaml` here."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Job
from gpucloud.usecases.start import current_run
from gpucloud.wiring import Gpucloud, KnownJob

DEFAULT_FILE = "gpucloud.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A job file as it is now, read."""

    file: Path
    job: Job
    spec: bytes


def read_target(cloud: Gpucloud, target: str | None) -> Target:
    """Return the job file that is meant. UsageError when there is none, JobFileError when it is wrong."""
    path = _file_of(cloud, target)
    if not path.is_file():
        hint = "gpucloud init writes one" if target is None else "gpucloud status lists known jobs"
        raise UsageError(f"there is no file {path}", hint=hint)
    return Target(file=path, job=cloud.read_job(path), spec=path.read_bytes())


def known_job(cloud: Gpucloud, target: str | None) -> KnownJob:
    """Return the run that is meant: the one of that name, or the newest of the job file's. UsageError if unknown."""
    if target is not None and not _is_file(target):
        return _named(cloud, target)
    read = read_target(cloud, target)
    store = cloud.store(read.job.store)
    found = current_run(store, read.job.name)
    if found is None:
        raise UsageError(f"{read.job.name} was never started", hint=f"gpucloud train {target or ''}".strip())
    return KnownJob(name=found[0], store=store.url, file=read.file)


def _file_of(cloud: Gpucloud, target: str | None) -> Path:
    if target is None:
        return Path(DEFAULT_FILE)
    return Path(target) if _is_file(target) else _named(cloud, target).file


def _is_file(target: str) -> bool:
    return "/" in target or target.endswith((".yaml", ".yml"))


def _named(cloud: Gpucloud, name: str) -> KnownJob:
    known = cloud.home.find(name)
    if known is not None:
        return known
    near = get_close_matches(name, [job.name for job in cloud.home.known()], n=1)
    hint = f"did you mean {near[0]}?" if near else "gpucloud status lists known jobs; a file name ends in .yaml"
    raise UsageError(f"no job is called {name!r}", hint=hint)
