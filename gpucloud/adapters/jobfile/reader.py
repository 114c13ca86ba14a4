"""Reads a job file: its bytes, its YAML, its keys, its surroundings, and at last the `Job`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpucloud.adapters.jobfile import document, rules
from gpucloud.adapters.jobfile.document import Document
from gpucloud.adapters.jobfile.model import CheckpointKeys, JobKeys, ModelKeys, NoCheckpoints, SshKeys
from gpucloud.adapters.jobfile.values import Fault, NodeRange, Unreadable
from gpucloud.adapters.jobfile.values import Path as Key
from gpucloud.domain.errors import JobFileError, Problem
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


def read_job(path: Path) -> Job:
    """Return the job in the file at `path`; JobFileError with every problem at once."""
    try:
        found = document.parse(_text(path))
        keys, faults = _check(found, _folder(path))
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


def _check(found: Document, folder: Path) -> tuple[JobKeys | None, list[Fault]]:
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
    faults += _new(rules.broken(found.root, folder, lambda key, text: _at(found, key, text)), faults)
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
