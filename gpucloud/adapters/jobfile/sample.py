"""The commented sample that `gpucloud init` writes; it documents every key."""

from __future__ import annotations

import re

from gpucloud.adapters import bundled
from gpucloud.adapters.jobfile.values import name as read_name
from gpucloud.domain.errors import UsageError


def sample_job(name: str) -> str:
    """Return the text of a job file for a job called `name`; UsageError when that is not a name."""
    try:
        read_name(name)
    except ValueError as error:
        hint = getattr(error, "hint", None)
        raise UsageError(str(error), hint=hint or "gpucloud init --name NAME") from error
    text = bundled.bundled("templates", "gpucloud.yaml").read_text(encoding="utf-8")
    return re.sub(r"(?m)^name: .*$", f"name: {name}", text, count=1)
