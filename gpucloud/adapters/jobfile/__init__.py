"""The job file: YAML in, a frozen `Job` or every problem at once out; and what helps to write one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gpucloud.adapters import home
from gpucloud.adapters.jobfile.model import JobKeys
from gpucloud.adapters.jobfile.reader import read_job, spec_sha256
from gpucloud.adapters.jobfile.values import line as read_line
from gpucloud.adapters.jobfile.values import name as read_name
from gpucloud.domain.errors import UsageError

__all__ = ["job_templates", "json_schema", "read_job", "sample_job", "spec_sha256", "template_job"]


_PLAIN = re.compile(r"[\w./-]+( [\w./=-]+)*")
_RUN = re.compile(r"(?m)^run: train\.py *(#.*)?$")
_SHORT = """\
# A gpucloud job: `gpucloud plan` says what it takes, `gpucloud train` runs it. Every key: gpucloud init --full
name: job
run: train.py               # a script and its arguments go to torchrun; another command line runs as given
cloud: local                # a rehearsal on this machine, without an account; then aws, or ssh (your own machines)
resources:
  nodes: 1                  # machines
  gpus: 1                   # GPUs in each
  #gpu: [A100, H100]        # models that will do
budget: 2 USD               # the most that it may cost, over all attempts: never exceeded
#deadline: 12h              # spot while it can wait, on demand when it cannot
#setup: uv pip install -r requirements.txt
#data: {s3://my-bucket/imagenet: /data}  # staged to every machine's fastest disk
#checkpoint: {directory: out}            # where a script saves that does not use gpucloud.resume
#outputs: [results/]        # brought home to outputs/<job>/
#secrets: [HF_TOKEN]        # read from your environment, never written down
#tags: {project: vision}    # on everything that is made
"""


def sample_job(name: str, run: str = "train.py", *, full: bool = False) -> str:
    """Return the text of a job file for a job called `name`, with every key where `full`.

    UsageError when that is not a name, or `run` not one line.
    """
    text = home.bundled("templates", "gpucloud.yaml").read_text(encoding="utf-8") if full else _SHORT
    try:
        written = json.dumps(read_line(run), ensure_ascii=False) if not _PLAIN.fullmatch(run) else run
    except ValueError as error:
        raise UsageError(f"--run {error}", hint="gpucloud init --run train.py") from error
    return named(_RUN.sub(lambda found: f"{f'run: {written}':<27} {found[1] or ''}".rstrip(), text, count=1), name)


def named(text: str, name: str) -> str:
    """Return a job file's text with that name in it; UsageError when it is not a name."""
    try:
        read_name(name)
    except ValueError as error:
        hint = getattr(error, "hint", None)
        raise UsageError(str(error), hint=hint or "gpucloud init NAME") from error
    return re.sub(r"(?m)^name: .*$", f"name: {name}", text, count=1)


# The job file as JSON Schema, for editors: `gpucloud schema`.


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file; every key has its description."""
    schema = _plain(JobKeys.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gpucloud job", **schema}


def _plain(node: Any) -> Any:
    """Return the schema without made-up titles, and without null: a key with no value is refused."""
    if isinstance(node, list):
        return [_plain(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    kept = {key: _plain(value) for key, value in node.items() if not _made_up(key, value)}
    only = kept.get("anyOf", ())
    return {**{key: value for key, value in kept.items() if key != "anyOf"}, **only[0]} if len(only) == 1 else kept


def _made_up(key: str, value: object) -> bool:
    return (key == "title" and isinstance(value, str)) or (
        key == "default" and (value is None or isinstance(value, dict))
    )


# The whole jobs that come along, each a job file with a folder of code: what `gpucloud init --template` writes.


def job_templates() -> dict[str, str]:
    """Return the templates' names in order, each with what its job file says first."""
    files = sorted(home.bundled("templates", "jobs").glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files}


def template_job(template: str, name: str) -> tuple[str, dict[Path, bytes]]:
    """Return the text of the template's job file for a job called `name`, and its code by relative path.

    Raises UsageError when there is no such template, or that is no name.
    """
    known = job_templates()
    if template not in known:
        raise UsageError(f"there is no template {template!r}", hint=f"choose one of {', '.join(known)}")
    folder = home.bundled("templates", "jobs")
    text = named((folder / f"{template}.yaml").read_text(encoding="utf-8"), name)
    found = (folder / template).rglob("*")
    files = sorted(file for file in found if file.is_file() and "__pycache__" not in file.parts)
    # It is going to be gpucloud.yaml, which needs no naming.
    text = re.sub(rf"(?m)^(#  +gpucloud train) {template}\.yaml$", r"\1", text)
    return text, {file.relative_to(folder): file.read_bytes() for file in files}
