"""`checkpoints`: a job's checkpoints listed, verified, pruned, pulled into a folder, exported as one file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpucloud.cli.checkpointtables import damage_json, gone_json, gone_text, standing_json, standing_text
from gpucloud.cli.meter import Meter
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.target import known_job, require_one_run
from gpucloud.domain.errors import GpucloudError, StoreError, UsageError
from gpucloud.domain.job import CheckpointPolicy
from gpucloud.domain.keeping.keys import files_apart
from gpucloud.domain.manifest import Manifest, Piece
from gpucloud.domain.quantities import counted, format_size
from gpucloud.store.directory import DirectoryStore, user_path
from gpucloud.usecases import exporting
from gpucloud.usecases.checkpoints import Shelf, of_step, restorable
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.pruning import Pruner
from gpucloud.usecases.pulling import Puller, Unpacker
from gpucloud.wiring import Gpucloud, KnownJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `checkpoints` is to do; at most one of `verify`, `prune`, `pull` and `export`."""

    verify: bool = False
    prune: bool = False
    pull: Path | None = None
    export: Path | None = None
    step: int | None = None
    everything: bool = False
    yes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    cloud: Gpucloud
    known: KnownJob
    jobs: JobStore
    shelf: Shelf

    @property
    def name(self) -> str:
        return self.known.name


def checkpoints(target: str | None, asked: Asked, *, as_json: bool) -> int:
    """Do what is asked and return the exit code: 15 when `verify` finds damage, 130 after Ctrl-C."""
    _require_one(asked)
    job = _job(target)
    if asked.prune and asked.yes:
        require_one_run(job.cloud, target, "gpucloud checkpoints JOB --prune --yes")
    act, stopped = _meant(asked)
    try:
        return act(job, asked, as_json)
    except KeyboardInterrupt:
        tell(f"stopped: {stopped}")
        return 130


def _require_one(asked: Asked) -> None:
    """UsageError for options that do not go together."""
    wanted = {"--verify": asked.verify, "--prune": asked.prune, "--pull": asked.pull, "--export": asked.export}
    given = [option for option, value in wanted.items() if value]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} are two things", hint="one of them at a time")
    for option, value, of in (
        ("--step", asked.step is not None, {"--verify", "--pull", "--export"}),
        ("--with-state", asked.everything, {"--export"}),
        ("--yes", asked.yes, {"--prune"}),
    ):
        if value and not of.intersection(given):
            raise UsageError(f"{option} says nothing alone", hint=f"{option} goes with {' or '.join(sorted(of))}")


def _job(target: str | None) -> _Job:
    cloud = Gpucloud()
    known = known_job(cloud, target)
    jobs = JobStore(cloud.store_of(known), known.name)
    keep = CheckpointPolicy().keep
    with suppress(GpucloudError):  # its file may be gone, or be another by now
        keep = cloud.read_job(known.file).checkpoint.keep
    return _Job(cloud=cloud, known=known, jobs=jobs, shelf=Shelf(store=jobs.store, prefix=jobs.checkpoints, keep=keep))


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
    standing = job.shelf.standing()
    if as_json:
        say_json({"job": job.name, "store": job.jobs.store.url, "checkpoints": [standing_json(o) for o in standing]})
    else:
        say(standing_text(standing) if standing else f"{job.name} has no checkpoints yet")
        if not standing:
            tell("hint: a script saves with gpucloud.resume, or into the job file's `checkpoint: {directory: …}`")
    return 0


def _verify(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    standing = job.shelf.standing()
    if not standing:
        raise _none(job)
    if asked.step is not None:
        standing = of_step(asked.step, standing)
    manifests = [one.found.manifest for one in standing if one.found.manifest is not None]
    pieces = [piece for manifest in manifests for piece in manifest.pieces]
    with Meter("verified", sum(piece.size for piece in pieces)) as meter:
        damages = job.shelf.verify(pieces, meter.moved)
    damaged = [one for one in standing if one.found.manifest is None]
    if as_json:
        say_json({"job": job.name, "verified": [damage_json(one, damages) for one in standing]})
    else:
        for one in damaged:
            say(f"the manifest of step {one.commit.step} (generation {one.commit.generation}) is not as it was written")
        for damage in damages:
            say(str(damage))
        if not damaged and not damages:
            steps = ", ".join(str(one.commit.step) for one in standing)
            size = format_size(sum(piece.size for piece in pieces))
            say(f"whole: step {steps}; {counted(len(pieces), 'object')}, {size}")
    return StoreError.exit_code if damaged or damages else 0


def _prune(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    pruner = Pruner(jobs=job.jobs, shelf=job.shelf, clock=job.cloud.clock)
    standing, gone = pruner.prune() if asked.yes else pruner.look()
    if as_json:
        say_json({"job": job.name, "deleted": asked.yes, **gone_json(standing, gone)})
    else:
        say(gone_text(standing, gone, deleted=asked.yes))
    if gone.keys and not asked.yes:
        tell("nothing was deleted; `--yes` deletes what is listed")
    return 0


def _pull(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    folder = user_path(asked.pull or Path(), "--pull")
    manifest = _wanted(job, asked)
    files = files_apart(manifest)
    if files is not None:
        return _unpack(job, manifest, files, folder, as_json=as_json)
    puller = Puller(shelf=job.shelf, target=DirectoryStore(folder))
    with Meter("pulled", sum(piece.size for piece in manifest.pieces)) as meter:
        pulled = puller.pull(manifest, meter.moved)
    job.cloud.asker(job.known).bill_pull(pulled.fetched)
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
        fetched = Unpacker(shelf=job.shelf, root=folder).unpack(files, meter.moved)
    job.cloud.asker(job.known).bill_pull(fetched)
    if as_json:
        answer = {"step": manifest.commit.step, "generation": manifest.commit.generation}
        sizes = {"bytes": size, "fetched_bytes": fetched, "files": len(files)}
        say_json({"job": job.name, **answer, "folder": str(folder.absolute()), **sizes})
        return 0
    known = f", {format_size(size - fetched)} of it was there" if size > fetched else ""
    sums = f"{counted(len(files), 'file')}, {format_size(size)}{known}"
    say(f"step {manifest.commit.step} is in {folder}, as the script wrote it: {sums}")
    return 0


def _export(job: _Job, asked: Asked, as_json: bool) -> int:  # noqa: FBT001
    path = user_path(asked.export or Path(), "--export")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"--export {path / (job.name + '.safetensors')}")
    if path.exists() and not path.is_file():  # a device, a pipe: the new file would take its place
        raise UsageError(f"{path} is no file", hint=f"--export {job.name}.safetensors")
    manifest = _wanted(job, asked)
    about = {"job": job.name, "step": str(manifest.commit.step), "generation": str(manifest.commit.generation)}
    plan = exporting.planned(job.shelf, manifest, everything=asked.everything, about=about)
    with Meter("read", exporting.bytes_to_read(manifest, plan)) as meter:
        exporting.write(job.shelf, manifest, plan, path, meter.moved)
    if as_json:
        answer = {"step": manifest.commit.step, "generation": manifest.commit.generation}
        say_json({"job": job.name, **answer, "file": str(path.absolute()), "bytes": plan.size, "tensors": plan.tensors})
    else:
        say(f"{path}: {plan.tensors} tensors of step {manifest.commit.step}, {format_size(plan.size)}")
    return 0


def _wanted(job: _Job, asked: Asked) -> Manifest:
    standing = job.shelf.standing()
    if not standing:
        raise _none(job)
    return restorable(asked.step, standing)


def _none(job: _Job) -> UsageError:
    return UsageError(f"{job.name} has no checkpoints yet", hint=f"gpucloud status {job.name}")
