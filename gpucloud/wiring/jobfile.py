"""Job files, what they name of the caller's environment, and what a repository is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Job

if TYPE_CHECKING:
    from gpucloud.adapters.packaging import Installed
    from gpucloud.domain.vendoring import Forge


def sample_job(name: str, run: str, *, full: bool) -> str:
    """Return a job file for a job of that name that runs that script: a short one, or one with every key."""
    from gpucloud.adapters import jobfile

    return jobfile.sample_job(name, run, full=full)


def job_templates() -> dict[str, str]:
    """Return the names of the jobs that come along, each with what it is."""
    from gpucloud.adapters import jobfile

    return jobfile.job_templates()


def template_job(template: str, name: str) -> tuple[str, dict[Path, bytes]]:
    """Return the text of a template's job file, and its code by relative path."""
    from gpucloud.adapters import jobfile

    return jobfile.template_job(template, name)


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


# What a repository's CI is given.


def install_pipeline(folder: Path, forges: frozenset[Forge], *, force: bool) -> Installed:
    """Put pipelines and what they install into the repository around `folder`; see `gpucloud.adapters.packaging`."""
    from gpucloud.adapters import packaging

    return packaging.install_pipeline(folder, forges, force=force)
