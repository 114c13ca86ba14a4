"""The commented sample that `gpucloud init` writes; it documents every key."""

from __future__ import annotations

import re

from gpucloud.adapters import bundled
from gpucloud.adapters.jobfile.values import name as read_name
from gpucloud.domain.errors import UsageError


def sample_job(name: str) -> str:
    """Return the text of a job file for a job called `name`; UsageError when that is not a name."""
    return named(bundled.bundled("templates", "gpucloud.yaml").read_text(encoding="utf-8"), name)


def named(text: str, name: str) -> str:
    """Return a job file's text with that name in it; UsageError when it is not a name."""
    try:
        read_name(name)
    except ValueError as error:
        hint = getattr(error, "hint", None)
        raise UsageError(str(error), hint=hint or "gpucloud init NAME") from error
    return re.sub(r"(?m)^name: .*$", f"name: {name}", text, count=1)
