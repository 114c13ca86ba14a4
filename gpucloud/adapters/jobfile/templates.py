"""The whole jobs that come along, each a job file with a folder of code: what `gpucloud init --template` writes."""

from __future__ import annotations

import re
from pathlib import Path

from gpucloud.adapters import bundled
from gpucloud.adapters.jobfile.sample import named
from gpucloud.domain.errors import UsageError


def job_templates() -> dict[str, str]:
    """Return the templates' names in order, each with what its job file says first."""
    files = sorted(bundled.bundled("templates", "jobs").glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files}


def template_job(template: str, name: str) -> tuple[str, dict[Path, bytes]]:
    """Return the text of the template's job file for a job called `name`, and its code by relative path.

    Raises UsageError when there is no such template, or that is no name.
    """
    known = job_templates()
    if template not in known:
        raise UsageError(f"there is no template {template!r}", hint=f"choose one of {', '.join(known)}")
    folder = bundled.bundled("templates", "jobs")
    text = named((folder / f"{template}.yaml").read_text(encoding="utf-8"), name)
    found = (folder / template).rglob("*")
    files = sorted(file for file in found if file.is_file() and "__pycache__" not in file.parts)
    # It is going to be gpucloud.yaml, which needs no naming.
    text = re.sub(rf"(?m)^(#  +gpucloud train) {template}\.yaml$", r"\1", text)
    return text, {file.relative_to(folder): file.read_bytes() for file in files}
