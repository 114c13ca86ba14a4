"""The job file: YAML in, a frozen `Job` or every problem at once out; and what helps to write one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpucloud.adapters import home
from gpucloud.adapters.jobfile import document, rules
from gpucloud.adapters.jobfile.document import Document
from gpucloud.adapters.jobfile.model import CheckpointKeys, JobKeys, ModelKeys, NoCheckpoints, SshKeys
from gpucloud.adapters.jobfile.values import Fault, NodeRange, Unreadable
from gpucloud.adapters.jobfile.values import Path as Key
from gpucloud.adapters.jobfile.values import line as read_line
from gpucloud.adapters.jobfile.values import name as read_name
from gpucloud.domain.errors import JobFileError, Problem, UsageError
from gpucloud.domain.job.spec import (
    USUAL_MFU_RECOMPUTED_PERCENT,
    AwsChoices,
    CheckpointDirectory,
    CheckpointPolicy,
    ContainerChoices,
    IdlePolicy,
    Job,
    MachineChoices,
    MarketPolicy,
    Mirrors,
    Model,
    OwnHost,
    Resources,
    SshChoices,
)

_LARGEST = 64 * 1024


def read_job(path: Path, require_region: Callable[[str], None] | None = None, *, to_start: bool = True) -> Job:
    """Return the job in the file at `path`; JobFileError with every problem at once.

    `require_region` raises UsageError for what is no region of AWS; without it any name will do. What lies beside the
    file is looked at `to_start` the job alone.
    """
    try:
        found = document.parse(_text(path))
        keys, faults = _check(found, _folder(path) if to_start else None, require_region)
    except Unreadable as error:
        raise JobFileError((_problem(path, error.fault),)) from error
    if keys is None or faults:
        ordered = sorted(faults, key=lambda fault: (fault.location.line, fault.location.column))
        raise JobFileError(tuple(_problem(path, fault) for fault in ordered))
    return _job(keys, path)


def spec_sha256(path: Path) -> str:
    """Return the SHA-256 of the job file's bytes, in hex; JobFileError when it cannot be read."""
    try:
        return hashlib.sha256(_data(path)).hexdigest()
    except Unreadable as error:
        raise JobFileError((_problem(path, error.fault),)) from error


def _text(path: Path) -> str:
    data = _data(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise Unreadable(line, column, f"byte 0x{data[error.start]:02X} is not UTF-8") from error


def _data(path: Path) -> bytes:
    if not path.exists():
        raise Unreadable(1, 1, "there is no such file", "gpucloud init writes a sample")
    if not path.is_file():
        raise Unreadable(1, 1, "is not a file")
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise Unreadable(1, 1, f"cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST:
        raise Unreadable(1, 1, f"is larger than {_LARGEST // 1024} KiB: is this a job file?")
    return data


def _check(
    found: Document, folder: Path | None, require_region: Callable[[str], None] | None
) -> tuple[JobKeys | None, list[Fault]]:
    """Return the keys, where they are all right, and every fault; one fault per place, the first that was found."""
    if not isinstance(found.root, dict):
        at = found.place(())
        raise Unreadable(at.line, at.column, 'a job file is a mapping of keys to values, such as "name: digits"')
    faults = list(found.faults)
    keys = None
    try:
        keys = JobKeys.model_validate(found.root)
    except ValidationError as error:
        faults += _new(document.faults(error, found), faults)

    def report(key: Key, text: str) -> Fault:
        return _at(found, key, text)

    faults += _new(rules.broken(found.root, report), faults)
    if folder is not None:
        faults += _new(rules.missing(found.root, folder, report), faults)
    if require_region is not None:
        faults += _new(rules.no_regions(found.root, require_region, report), faults)
    return keys, faults


def _new(found: Any, known: list[Fault]) -> list[Fault]:
    covered = {fault.path for fault in known if fault.path}
    return [fault for fault in found if not any(fault.path[: len(path)] == path for path in covered)]


def _at(found: Document, key: Key, message: str) -> Fault:
    if key[-1] == rules.KEY:
        return Fault(path=key[:-1], location=found.keys[key[:-1]], message=message)
    known = found.known(key)
    return Fault(path=known, location=found.values[known], message=message)


def _problem(path: Path, fault: Fault) -> Problem:
    return Problem(
        file=str(path),
        line=fault.location.line,
        column=fault.location.column,
        path=document.shown(fault.path),
        message=fault.message,
        hint=fault.hint,
    )


def _folder(path: Path) -> Path:
    return path.absolute().parent


def _job(keys: JobKeys, path: Path) -> Job:
    folder = _folder(path)
    return Job(
        name=keys.name,
        run=keys.run,
        budget_usd=keys.budget,
        source=path.absolute(),
        code=rules.beside(folder, keys.code),
        cloud=keys.cloud,
        aws=AwsChoices(**dict(keys.aws)),
        ssh=_hosts(keys.ssh, folder),
        resources=_resources(keys),
        machine=MachineChoices(**dict(keys.machine)),
        gate=keys.gate,
        image=keys.image,
        container=ContainerChoices(**dict(keys.container)),
        conda=keys.conda,
        setup=keys.setup,
        mirrors=Mirrors(**dict(keys.mirrors)),
        launcher=keys.launcher,
        store=None if keys.store is None else _place(keys.store, folder),
        checkpoint=_policy(keys.checkpoint),
        model=None if keys.model is None else _model(keys.model),
        work=keys.work,
        deadline=keys.deadline,
        policy=keys.policy,
        idle=None if keys.idle is None else IdlePolicy(below=keys.idle.below, lasting=keys.idle.for_),
        hold=keys.hold,
        data=tuple((_place(source, folder), target) for source, target in keys.data.items()),
        outputs=keys.outputs,
        metrics=tuple(keys.metrics.items()),
        tags=tuple(keys.tags.items()),
        env=tuple(keys.env.items()),
        secrets=keys.secrets,
    )


def _resources(keys: JobKeys) -> Resources:
    """A deadline is kept with machines on demand where spot is not enough, unless the file names a market."""
    wanted = dict(keys.resources)
    if isinstance(keys.resources.nodes, NodeRange):
        wanted |= {"nodes": keys.resources.nodes.most, "least_nodes": keys.resources.nodes.least}
    resources = Resources(**wanted)
    named = "market" in keys.resources.model_fields_set
    return resources if named or keys.deadline is None else replace(resources, market=MarketPolicy.AUTO)


def _hosts(keys: SshKeys, folder: Path) -> SshChoices:
    return SshChoices(
        hosts=tuple(OwnHost(**dict(host)) for host in keys.hosts),
        key=None if keys.key is None else rules.beside(folder, keys.key),
        usd_per_hour=keys.price,
    )


def _model(keys: ModelKeys) -> Model:
    is_named = "mfu" in keys.model_fields_set
    mfu_percent = keys.mfu if is_named or not keys.recompute else USUAL_MFU_RECOMPUTED_PERCENT
    return Model(mfu_percent=mfu_percent, **{key: value for key, value in keys if key != "mfu"})


def _policy(keys: CheckpointKeys) -> CheckpointPolicy:
    steps = keys.every if isinstance(keys.every, int) else None
    return CheckpointPolicy(
        every=keys.every if isinstance(keys.every, timedelta) else None,
        every_steps=steps,
        keep=keys.keep,
        give_up=keys.give_up,
        directory=None if keys.directory is None else _directory(keys, keys.directory),
        none=isinstance(keys, NoCheckpoints),
    )


def _directory(keys: CheckpointKeys, path: str) -> CheckpointDirectory:
    return CheckpointDirectory(
        path=path,
        layout=keys.layout,
        done_file=keys.done_file,
        on_notice=keys.on_notice,
        settle=keys.settle,
        per_node=keys.per_node,
        resume_args=keys.resume_args,
        resume_variables=tuple(keys.resume_variables.items()),
    )


def _place(written: str, folder: Path) -> str:
    """Return `s3://…` as it is, and a path as an absolute one."""
    if "://" in written:
        return written.removeprefix("file://")
    return str(rules.beside(folder, written))


# What helps to write one: a sample with the job's name in it.


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
budget: 2 USD               # the most for machines, disks and addresses, over all attempts: never exceeded
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
