"""`checkpoints`: a job's checkpoints listed, verified, pruned, pulled into a folder, exported as one file."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.cli.render.words import Meter, left, say, say_json, say_words, table, tell
from gpucloud.cli.target import known_job, require_one_run
from gpucloud.domain import codec
from gpucloud.domain.checkpoint.directory import files_apart
from gpucloud.domain.checkpoint.manifest import Counts, Manifest, Piece
from gpucloud.domain.checkpoint.protection import what_saves_first
from gpucloud.domain.checkpoint.standing import CheckpointMark, Standing, Superfluous
from gpucloud.domain.errors import GpucloudError, StoreError, UsageError
from gpucloud.domain.job.quantities import counted, format_size
from gpucloud.domain.job.spec import CheckpointPolicy
from gpucloud.store.directory import DirectoryStore, user_path
from gpucloud.system.wholefile import write_whole
from gpucloud.usecases.checkpoint import pulling
from gpucloud.usecases.checkpoint.checkpoints import (
    Damage,
    Pruner,
    StoredCheckpoints,
    of_other_format,
    of_step,
    restorable,
)
from gpucloud.usecases.checkpoint.pulling import Puller, Unpacker
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.jobs import asker_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `checkpoints` is to do; at most one of `verify`, `prune`, `pull` and `export`."""

    verify: bool = False
    prune: bool = False
    pull: Path | None = None
    export: Path | None = None
    step: int | None = None
    best: bool = False
    everything: bool = False
    yes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    cloud: Gpucloud
    known: KnownJob
    jobs: JobStore
    stored_checkpoints: StoredCheckpoints
    saves: CheckpointPolicy | None = None
    """As its order says; None where nobody can tell."""

    def has_ended(self) -> bool:
        """Read whether it is over, by its state, where that can be read."""
        with suppress(GpucloudError):
            found = self.jobs.load()
            return found is not None and found[0].status.ended
        return False

    @property
    def name(self) -> str:
        return self.known.name


def checkpoints(target: str | None, asked: Asked, *, as_json: bool) -> int:
    """Do what is asked and return the exit code: 15 when `verify` finds damage, 130 after Ctrl-C."""
    _require_one(asked)
    job = _job(target, asked)
    if asked.prune and asked.yes:
        require_one_run(job.cloud, target, "gpucloud checkpoints JOB --prune --yes")
    act, stopped = _meant(asked)
    try:
        return act(job, asked, as_json)
    except KeyboardInterrupt:
        tell(f"stopped: {stopped}")
        return left(130, f"stopped: {stopped}", as_json=as_json)


def _require_one(asked: Asked) -> None:
    """UsageError for options that do not go together."""
    wanted = {"--verify": asked.verify, "--prune": asked.prune, "--pull": asked.pull, "--export": asked.export}
    given = [option for option, value in wanted.items() if value]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} are two things", hint="one of them at a time")
    if asked.best and asked.step is not None:
        raise UsageError("--best and --step are two checkpoints", hint="one of them at a time")
    for option, value, of in (
        ("--step", asked.step is not None, {"--verify", "--pull", "--export"}),
        ("--best", asked.best, {"--pull", "--export"}),
        ("--with-state", asked.everything, {"--export"}),
        ("--yes", asked.yes, {"--prune"}),
    ):
        if value and not of.intersection(given):
            raise UsageError(f"{option} says nothing alone", hint=f"{option} goes with {' or '.join(sorted(of))}")


def _job(target: str | None, asked: Asked) -> _Job:
    """Return the job, with how many checkpoints its order keeps: nothing is deleted by a guess at that."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    jobs = JobStore(cloud.store_of(known), known.name)
    keep, saves = CheckpointPolicy().keep, None
    try:
        order = asker_of(cloud, known).order()
        keep = order.resolved.checkpoint.keep
        saves = None if order.is_stand_in else order.resolved.checkpoint
    except GpucloudError:
        if asked.prune:
            raise
    else:
        if asked.prune and order.is_stand_in:
            raise UsageError(
                f"nobody can tell how many checkpoints {known.name} keeps: its order was lost before its end",
                hint=f"gpucloud rm {known.name} --with-checkpoints deletes all of it",
            )
    return _Job(
        cloud=cloud,
        known=known,
        jobs=jobs,
        stored_checkpoints=StoredCheckpoints(store=jobs.store, prefix=jobs.checkpoints, keep=keep),
        saves=saves,
    )


def _meant(asked: Asked) -> tuple[Callable[[_Job, Asked, bool], int], str]:
    """Return what does it, and what to say when that is broken off."""
    if asked.verify:
        return _verify, "nothing was changed"
    if asked.prune:
        return _prune, "what was deleted is gone; the same command goes on"
    if asked.pull is not None:
        return _pull, f"{asked.pull} has no checkpoint more than before; the same command goes on from here"
    if asked.export is not None:
        return _export, f"{asked.export} was not written"
    return _list, "nothing was changed"


def _list(job: _Job, _asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    standing = job.stored_checkpoints.standing()
    if as_json:
        say_json({"job": job.name, "store": job.jobs.store.url, "checkpoints": [standing_json(o) for o in standing]})
    else:
        ended = not standing and job.has_ended()
        say_words(standing_text(standing) if standing else _none_words(job, ended=ended))
        if not standing:
            tell(f"hint: {what_saves_first(job.saves, ended=ended)}")
    return 0


def _number(manifest: Manifest) -> str:
    return str(manifest.commit.step)


def _verify(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    standing = job.stored_checkpoints.standing()
    if not standing:
        raise _none(job)
    if asked.step is not None:
        standing = of_step(asked.step, standing)
    manifests = [one.found.manifest for one in standing if one.found.manifest is not None]
    pieces = [piece for manifest in manifests for piece in manifest.pieces]
    with Meter("verified", sum(piece.size for piece in pieces)) as meter:
        damages = job.stored_checkpoints.verify(pieces, meter.moved)
    damages, standing = _without_collected(job, damages, standing)
    manifests = [one.found.manifest for one in standing if one.found.manifest is not None]
    unread = [one for one in standing if one.found.other_format]
    damaged = [one for one in standing if one.found.manifest is None and one not in unread]
    for one in unread:
        tell(f"not verified: {of_other_format(one.commit)}")
    if as_json:
        say_json({"job": job.name, "verified": [damage_json(one, damages) for one in standing]})
    else:
        for one in damaged:
            say_words(f"the manifest of checkpoint {one.commit.step} (generation {one.commit.generation}) is damaged")
        for damage in damages:
            say_words(str(damage))
        if len(unread) == len(standing):
            say_words("nothing was verified")
        if manifests and not damaged and not damages:
            pieces = [piece for manifest in manifests for piece in manifest.pieces]
            saves = any(manifest.counts is Counts.SAVES for manifest in manifests)
            steps = ", ".join(map(str, manifests)) if saves else f"step {', '.join(map(_number, manifests))}"
            size = format_size(sum(piece.size for piece in pieces))
            say_words(f"whole: {steps}; {counted(len(pieces), 'object')}, {size}")
    # Whoever asked whether all is whole may not take for it that nothing could be read.
    return StoreError.exit_code if damaged or damages or len(unread) == len(standing) else 0


def _without_collected(
    job: _Job, damages: tuple[Damage, ...], standing: tuple[Standing, ...]
) -> tuple[tuple[Damage, ...], tuple[Standing, ...]]:
    """Leave out what the job deleted while it was read, and say so; StoreError where that was all of it."""
    gone = job.stored_checkpoints.collected(damage.key for damage in damages)
    left = tuple(one for one in standing if one.commit not in gone)
    if gone:
        steps = ", ".join(str(commit.step) for commit in sorted(gone, key=lambda one: (one.step, one.generation)))
        what = f"deleted while it was read, as the job needs it no longer: step {steps}"
        if not left:
            raise StoreError(what, hint="the same command again, without --step")
        tell(f"not verified: {what}")
    keys = {piece.key for one in left if one.found.manifest is not None for piece in one.found.manifest.pieces}
    return tuple(damage for damage in damages if damage.key in keys), left


def _prune(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    pruner = Pruner(jobs=job.jobs, stored_checkpoints=job.stored_checkpoints, clock=job.cloud.clock)
    standing, gone = pruner.prune() if asked.yes else pruner.look()
    if as_json:
        say_json({"job": job.name, "deleted": asked.yes, **gone_json(standing, gone)})
    else:
        say_words(gone_text(standing, gone, deleted=asked.yes))
    if gone.keys and not asked.yes:
        tell("nothing was deleted; `--yes` deletes what is listed")
    return 0


def _pull(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    folder = user_path(asked.pull or Path(), "--pull")
    manifest = _wanted(job, asked)
    files = files_apart(manifest)
    if files is not None:
        return _unpack(job, manifest, files, folder, as_json=as_json)
    puller = Puller(stored_checkpoints=job.stored_checkpoints, target=DirectoryStore(folder))
    with Meter("pulled", sum(piece.size for piece in manifest.pieces)) as meter:
        pulled = puller.pull(manifest, meter.moved)
    asker_of(job.cloud, job.known).bill_pull(pulled.fetched)
    if as_json:
        answer = {"step": pulled.commit.step, "generation": pulled.commit.generation, "folder": str(folder.absolute())}
        sizes = {"bytes": pulled.size, "fetched_bytes": pulled.fetched, "resumes_from": pulled.first.step}
        say_json({"job": job.name, **answer, **sizes})
        return 0
    there = pulled.size - pulled.fetched
    known = f", {format_size(there)} of it was there" if there else ""
    say(f"step {pulled.commit.step} is in {folder}: {format_size(pulled.size)}{known}")
    if pulled.first != pulled.commit:
        tell(f"{folder} has step {pulled.first.step} too, which a script takes first")
    tell(f"GPUCLOUD_STORE={shlex.quote(str(folder.absolute()))} has a script resume from it")
    return 0


def _unpack(job: _Job, manifest: Manifest, files: tuple[tuple[str, Piece], ...], folder: Path, *, as_json: bool) -> int:
    """Bring the files of a script that saves by itself: there is nothing to resume from but the files."""
    size = sum(piece.size for _, piece in files)
    with Meter("pulled", size) as meter:
        fetched = Unpacker(stored_checkpoints=job.stored_checkpoints, root=folder).unpack(files, meter.moved)
    asker_of(job.cloud, job.known).bill_pull(fetched)
    if as_json:
        answer = {"step": manifest.commit.step, "generation": manifest.commit.generation}
        sizes = {"bytes": size, "fetched_bytes": fetched, "files": len(files)}
        say_json({"job": job.name, **answer, "folder": str(folder.absolute()), **sizes})
        return 0
    known = f", {format_size(size - fetched)} of it was there" if size > fetched else ""
    sums = f"{counted(len(files), 'file')}, {format_size(size)}{known}"
    say(f"{manifest} is in {folder}, as the script wrote it: {sums}")
    return 0


_ASIDE = "name another folder, or move it away"


def _export(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    path = user_path(asked.export or Path(), "--export")
    folder = path if path.is_dir() else None
    path = path / "model.safetensors" if folder is not None else path
    if path.exists() and not path.is_file():  # a device, a pipe: the new file would take its place
        raise UsageError(f"{path} is no file", hint=f"--export {job.name}.safetensors")
    manifest = _wanted(job, asked)
    about = {"job": job.name, "step": str(manifest.commit.step), "generation": str(manifest.commit.generation)}
    before = pulling.about_export(path) if folder is not None else {}
    if folder is not None and path.exists() and before.get("job") != job.name:
        raise UsageError(f"{path} is there already, and no --export of {job.name} wrote it", hint=_ASIDE)
    config = _config(folder, manifest, before.get(_CONFIGS, "").split()) if folder is not None else None
    if config is not None:
        about[_CONFIGS] = " ".join(config[2])
    plan = pulling.planned(job.stored_checkpoints, manifest, everything=asked.everything, about=about)
    with Meter("read", pulling.bytes_to_read(manifest, plan)) as meter:
        pulling.write(job.stored_checkpoints, manifest, plan, path, meter.moved)
    if config is not None:
        write_whole(config[0], config[1], mode=0o644)
    if as_json:
        answer = {"step": manifest.commit.step, "generation": manifest.commit.generation}
        files = {"file": str(path.absolute()), "config": str(config[0].absolute()) if config is not None else None}
        say_json({"job": job.name, **answer, **files, "bytes": plan.size, "tensors": plan.tensors})
    else:
        beside = f"; {config[0]}" if config is not None else ""
        say(f"{path}: {plan.tensors} tensors of {manifest}, {format_size(plan.size)}{beside}")
    return 0


_CONFIGS = "config_sha256"
"""In the file of weights: which `config.json` comes with them, and which an export leaves that is cut off before it."""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _config(folder: Path, manifest: Manifest, before: Sequence[str]) -> tuple[Path, str, list[str]] | None:
    """Return the model's `config.json` as it comes beside its weights, and its hash and that of the one there now.

    None where the script gave none. UsageError where another one is there than those of `before`, which an earlier
    export knew for its own.
    """
    config, path = manifest.notes.values.get("config"), folder / "config.json"
    if not isinstance(config, dict):
        return None
    text = json.dumps(config, indent=2) + "\n"
    hashes = [_sha256(text.encode())]
    try:
        if path.exists():
            hashes.append(_sha256(path.read_bytes()))
    except OSError:
        hashes.append("")
    if hashes[-1] not in (*before, hashes[0]):
        raise UsageError(f"{path} is there already, and differs", hint=_ASIDE)
    return path, text, hashes


def _wanted(job: _Job, asked: Asked) -> Manifest:
    standing = job.stored_checkpoints.standing()
    if not standing:
        raise _none(job)
    return restorable(asked.step, standing, best=asked.best)


def _none(job: _Job) -> UsageError:
    return UsageError(_none_words(job, ended=job.has_ended()), hint=f"gpucloud status {job.name}")


def _none_words(job: _Job, *, ended: bool) -> str:
    return f"{job.name} has ended, and has no checkpoints" if ended else f"{job.name} has no checkpoints yet"


# Checkpoints as text for people, and as JSON for programs.


_WORDS = {
    CheckpointMark.NEXT: "restored first",
    CheckpointMark.BASE: "base of this generation",
    CheckpointMark.BEST: "best",
    CheckpointMark.KEPT: "kept",
    CheckpointMark.DAMAGED: "its manifest is damaged",
    CheckpointMark.OTHER_FORMAT: "of another gpucloud's format: not read here",
    CheckpointMark.INCOMPLETE: "objects are missing",
    CheckpointMark.UNREACHABLE: "its generation has no record: never restored",
}


def standing_text(standing: Sequence[Standing]) -> str:
    """Return one line a checkpoint, the one that a restore tries first above; then why some are not exact."""
    rows = [
        ("step", "generation", "committed (UTC)", "size", "objects", "ranks", "level", "why", ""),
        *map(_row, standing),
    ]
    reasons = {one.found.manifest.promise: None for one in standing if one.found.manifest}
    told = [f"{one.level.value}: {one.reason}" for one in reasons if one.reason]
    if any(one.found.manifest.counts is Counts.SAVES for one in standing if one.found.manifest):
        told.append("save 1, 2, …: the job's first, second, … that was kept; no step can be read from them")
    spare = ("objects", "ranks", "generation")
    return "\n\n".join([table(rows, spare), *(["\n".join(told)] if told else [])])


def standing_json(one: Standing) -> dict[str, Any]:
    """Return a checkpoint as an object; what its manifest would say is null where that cannot be read."""
    manifest = one.found.manifest
    return {
        **_named(one),
        "committed_at": codec.plain(one.found.committed_at),
        "objects": len(manifest.pieces) if manifest else None,
        "ranks": manifest.world if manifest else None,
        "level": manifest.promise.level.value if manifest else None,
        "reason": manifest.promise.reason if manifest else None,
        "why": manifest.why.value if manifest else None,
        "counts": manifest.counts.value if manifest else None,
        "metric": one.found.metric,
        "marks": [mark.value for mark in CheckpointMark if mark in one.marks],
    }


def damage_json(one: Standing, damages: Sequence[Damage]) -> dict[str, Any]:
    """Return a verified checkpoint as an object, with what is damaged of it; `whole` is null where nobody can tell."""
    keys = {piece.key for piece in one.found.manifest.pieces} if one.found.manifest else set()
    damaged = [{"object": d.key, "part": d.part or None, "what": d.what} for d in damages if d.key in keys]
    whole = None if one.found.other_format else one.found.manifest is not None and not damaged
    return {**_named(one), "whole": whole, "damaged": damaged}


def gone_text(standing: Sequence[Standing], gone: Superfluous, *, deleted: bool) -> str:
    """Return what went or would go, and how much that is."""
    if not gone.keys:
        return "nothing is superfluous"
    rows = [("step", "generation", "committed (UTC)", "size"), *(_row(one)[:4] for one in _of(standing, gone))]
    size = sum(one.size or 0 for one in _of(standing, gone))
    unfinished = f", and {counted(gone.unfinished, 'object')} of saves that were never committed"
    sums = f"{counted(len(gone.commits), 'checkpoint')}, {format_size(size)}{unfinished if gone.unfinished else ''}"
    return "\n\n".join([*([table(rows)] if gone.commits else []), sums + (" deleted" if deleted else "")])


def gone_json(standing: Sequence[Standing], gone: Superfluous) -> dict[str, Any]:
    """Return the same as an object."""
    found = _of(standing, gone)
    return {
        "checkpoints": [_named(one) for one in found],
        "bytes": sum(one.size or 0 for one in found),
        "unfinished_objects": gone.unfinished,
    }


def _of(standing: Sequence[Standing], gone: Superfluous) -> list[Standing]:
    doomed = frozenset(gone.commits)
    return [one for one in standing if one.commit in doomed]


def _row(one: Standing) -> tuple[str, ...]:
    manifest = one.found.manifest
    told = ("-", "-", "-", "-")
    if manifest is not None:
        told = (str(len(manifest.pieces)), str(manifest.world), manifest.promise.level.value, manifest.why.value)
    counts_saves = manifest is not None and manifest.counts is Counts.SAVES
    return (
        str(manifest) if counts_saves else str(one.commit.step),
        str(one.commit.generation),
        f"{one.found.committed_at:%Y-%m-%d %H:%M:%S}",
        format_size(one.size) if one.size is not None else "-",
        *told,
        ", ".join(_told(mark, one) for mark in CheckpointMark if mark in one.marks),
    )


def _told(mark: CheckpointMark, one: Standing) -> str:
    has_metric = mark is CheckpointMark.BEST and one.found.metric is not None
    return f"{_WORDS[mark]} ({one.found.metric:.6g})" if has_metric else _WORDS[mark]


def _named(one: Standing) -> dict[str, Any]:
    return {"step": one.commit.step, "generation": one.commit.generation, "bytes": one.size}
