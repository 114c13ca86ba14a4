"""`init`, `schema` and `ci init`: what helps to write a job file, and what a repository's CI runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gpucloud.cli.render.words import say, say_json, tell
from gpucloud.cli.target import DEFAULT_FILE
from gpucloud.domain.errors import UsageError
from gpucloud.domain.vendoring import Forge
from gpucloud.wiring import install_pipeline, job_schema, job_templates, sample_job, template_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What `init` writes: a short file, with every key if `full`, or a whole job called `template`.

    `name` is the folder's if left out, `run` the script that is there.
    """

    name: str | None
    template: str | None
    run: str | None
    full: bool
    force: bool


def init(wish: Wish, *, as_json: bool) -> int:
    """Write a job file here, and a template's code beside it; return the exit code."""
    name = wish.name or _name_of(Path.cwd())
    if wish.template is not None and (wish.run is not None or wish.full):
        raise UsageError("--template brings its own script and file", hint="leave --run and --full out")
    run = wish.run or _script_of(Path.cwd())
    text, code = template_job(wish.template, name) if wish.template else (sample_job(name, run, full=wish.full), {})
    files = {Path(DEFAULT_FILE): text.encode(), **code}
    there = [path for path in files if path.exists()]
    if there and not wish.force:
        raise UsageError(f"{there[0]} is there already", hint="--force writes over it")
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if as_json:
        say_json({"file": DEFAULT_FILE, "code": [str(path) for path in code]})
    else:
        say(f"wrote {', '.join(map(str, files))}; `gpucloud train` runs it")
    return 0


def templates(*, as_json: bool) -> int:
    """Write which templates there are; return the exit code."""
    known = job_templates()
    if as_json:
        say_json({"templates": [{"name": name, "about": about} for name, about in known.items()]})
        return 0
    width = max(map(len, known))
    for name, about in known.items():
        say(f"{name:{width}}  {about}")
    return 0


def schema() -> int:
    """Write the job file's JSON Schema; return the exit code."""
    say(json.dumps(job_schema(), indent=2))
    return 0


def _script_of(folder: Path) -> str:
    """Return the script that is meant where nobody says which: train.py, or the only one."""
    there = sorted(path.name for path in folder.glob("*.py"))
    return there[0] if len(there) == 1 else "train.py"


def _name_of(folder: Path) -> str:
    """Return the folder's name in the letters that a job's name may have."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in folder.name.lower())
    return letters.strip("-")[:40].strip("-") or "job"


# `ci init`: a repository's own copy of all that its CI runs.


def init_ci(*, github: bool, gitlab: bool, force: bool, as_json: bool) -> int:
    """Put pipelines, gpucloud's wheel and the lock into the repository; return the exit code."""
    chosen = {Forge.GITHUB: github, Forge.GITLAB: gitlab}
    done = install_pipeline(Path.cwd(), frozenset(forge for forge, wanted in chosen.items() if wanted), force=force)
    found = done.update
    written = (*found.written, *found.in_the_way)
    if as_json:
        lists = {"written": written, "removed": found.removed, "kept": found.kept}
        say_json({name: list(paths) for name, paths in lists.items()} | {"wheel": done.wheel, "sha256": done.sha256})
    else:
        say("\n".join([f"wrote {path}" for path in written] + [f"removed {path}" for path in found.removed]))
    for path in found.kept:
        tell(f"{path} was edited here and stays; what gpucloud would write is as it was")
    if done.to_add is not None:
        name, text = done.to_add
        for line in (f"{name} is yours; add to it:", *text.rstrip().splitlines()):
            tell(line)
    tell(f"{done.wheel} has SHA-256 {done.sha256}; commit all of it (`git add -f` where *.whl is ignored)")
    return 0
