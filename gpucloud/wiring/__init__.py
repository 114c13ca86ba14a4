"""The one composition root: job and environment in, adapters out. Late imports live here, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.home import Home
from gpucloud.adapters.scripts import how_it_saves, imports_resume
from gpucloud.adapters.transfer.localfiles import local_tree as local_folder
from gpucloud.adapters.transfer.localfiles import place_in_code
from gpucloud.adapters.transfer.localfiles import sent as local_file
from gpucloud.domain.job.spec import KnownJob
from gpucloud.wiring.root import Gpucloud

if TYPE_CHECKING:
    from gpucloud.adapters.handbook import Page
    from gpucloud.adapters.packaging import Installed

__all__ = [
    "Gpucloud",
    "Home",
    "KnownJob",
    "find_page",
    "handbook",
    "how_it_saves",
    "imports_resume",
    "install_pipeline",
    "job_schema",
    "job_templates",
    "local_file",
    "local_folder",
    "place_in_code",
    "sample_job",
    "template_job",
]


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


def install_pipeline(folder: Path, *, github: bool, gitlab: bool, force: bool) -> Installed:
    """Put pipelines and what they install into the repository around `folder`; see `gpucloud.adapters.packaging`."""
    from gpucloud.adapters.packaging import Forge, install_pipeline

    asked = {Forge.GITHUB: github, Forge.GITLAB: gitlab}
    return install_pipeline(folder, frozenset(forge for forge, wanted in asked.items() if wanted), force=force)


def handbook() -> tuple[Page, ...]:
    """Return the handbook's pages, in order, and then its translations."""
    from gpucloud.adapters.handbook import pages, translations

    return (*pages(), *translations())


def find_page(known: tuple[Page, ...], topic: str) -> Page:
    """Return the page or section that a topic means; see `gpucloud.adapters.handbook`."""
    from gpucloud.adapters.handbook import find

    return find(known, topic)
