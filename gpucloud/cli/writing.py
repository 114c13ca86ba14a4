"""`init` and `schema`: what helps to write a job file."""

from __future__ import annotations

import json
from pathlib import Path

from gpucloud.cli.render import say, say_json
from gpucloud.cli.target import DEFAULT_FILE
from gpucloud.domain.errors import UsageError
from gpucloud.wiring import job_schema, sample_job


def init(name: str | None, *, force: bool, as_json: bool) -> int:
    """Write a commented job file here; return the exit code."""
    path = Path(DEFAULT_FILE)
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", hint="--force writes over it")
    path.write_text(sample_job(name or _name_of(Path.cwd())))
    if as_json:
        say_json({"file": str(path)})
    else:
        say(f"wrote {path}; `gpucloud train` runs it")
    return 0


def schema() -> int:
    """Write the job file's JSON Schema; return the exit code."""
    say(json.dumps(job_schema(), indent=2))
    return 0


def _name_of(folder: Path) -> str:
    """Return the folder's name in the letters that a job's name may have."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in folder.name.lower())
    return letters.strip("-")[:40].strip("-") or "job"
