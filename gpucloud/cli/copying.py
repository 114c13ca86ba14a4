"""`cp`: files between this machine and a job's machines, and out of a job's store."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.cli.machines import node_of
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.target import known_job
from gpucloud.domain.errors import UsageError
from gpucloud.domain.quantities import format_size
from gpucloud.wiring import Gpucloud, KnownJob, local_file, local_folder

if TYPE_CHECKING:
    from gpucloud.adapters.copying import Copier, Listing

_STORE = "@store/"
_FORMS = "gpucloud cp JOB:path here, or gpucloud cp here JOB:path"


@dataclass(frozen=True, slots=True, kw_only=True)
class _There:
    job: str
    path: str


def copy(source: str, target: str, *, node: str | None, recursive: bool, as_json: bool) -> int:
    """Copy one way or the other and return the exit code."""
    here, there = _parsed(source), _parsed(target)
    if isinstance(here, _There) and not isinstance(there, _There):
        files, moved = _bring(here, there, node, recursive=recursive)
    elif isinstance(there, _There) and not isinstance(here, _There):
        files, moved = _take(here, there, node, recursive=recursive)
    else:
        raise UsageError("one of the two must be JOB:path, the other a path here", hint=_FORMS)
    if as_json:
        say_json({"files": files, "bytes": moved})
    else:
        say(f"{files} file{'' if files == 1 else 's'}, {format_size(moved)} copied")
    return 0


def _parsed(written: str) -> _There | Path:
    job, colon, path = written.partition(":")
    if colon and job and "/" not in job:
        return _There(job=job, path=path or ".")
    return Path(written)


def _bring(there: _There, target: Path, node: str | None, *, recursive: bool) -> tuple[int, int]:
    cloud = Gpucloud()
    known = known_job(cloud, there.job)
    if there.path.startswith("@"):
        return _from_store(cloud, known, there.path, target, recursive=recursive)
    with cloud.copier(known, node_of(cloud, known, node), _shown) as copier:
        found = copier.listing([there.path])
        _refuse(found, there, recursive=recursive)
        places, below = _places(found, there.path, target)
        links = [(place, link) for (_, link), place in zip(found.links, places[len(found.files) :], strict=True)]
        moved = copier.fetch(list(zip(found.files, places, strict=False)), links, root=below)
    cloud.asker(known).bill_pull(moved)
    for path in found.outside:
        tell(f"left out: {path} leads elsewhere, or is no file")
    return len(found.files) + len(links), moved


def _refuse(found: Listing, there: _There, *, recursive: bool) -> None:
    for path, near in found.missing:
        hint = f"did you mean {there.job}:{near}?" if near else f"gpucloud ssh {there.job} -- ls {found.base}"
        raise UsageError(f"there is no {path} on the node", hint=hint)
    if found.folders and not recursive:
        raise UsageError(f"{found.folders[0]} is a folder", hint=f"gpucloud cp -r {there.job}:{there.path} …")


def _places(found: Listing, written: str, target: Path) -> tuple[list[Path], Path]:
    """Return where everything arrives, and the folder that all of that is below.

    As cp(1): into a folder that is there under the source's own name, else as the name that is given.
    """
    names = [*(file.path for file in found.files), *(path for path, _ in found.links)]
    if found.folders:
        top = found.folders[0]
        below = target / Path(top).name if target.is_dir() and top not in (".", "/") else target
        return [below / (name.removeprefix(top).lstrip("/") if top != "." else name) for name in names], below
    if len(names) == 1 and not target.is_dir() and written == names[0]:
        return [target], target.parent
    if len(names) > 1 and not target.is_dir():
        raise UsageError(f"{target} is no folder, and {written} names {len(names)} files", hint=f"mkdir -p {target}")
    return [target / Path(name).name for name in names], target


def _take(source: Path, there: _There, node: str | None, *, recursive: bool) -> tuple[int, int]:
    if there.path.startswith("@"):
        raise UsageError("the store is written by the job only", hint=f"gpucloud cp {source} {there.job}:.")
    if not source.exists():
        names = [path.name for path in source.parent.iterdir()] if source.parent.is_dir() else []
        near = get_close_matches(source.name, names, n=1)
        raise UsageError(f"there is no {source}", hint=f"did you mean {source.with_name(near[0])}?" if near else None)
    if source.is_dir() and not recursive:
        raise UsageError(f"{source} is a folder", hint=f"gpucloud cp -r {source} {there.job}:{there.path}")
    cloud = Gpucloud()
    known = known_job(cloud, there.job)
    with cloud.copier(known, node_of(cloud, known, node), _shown) as copier:
        name = _remote_name(copier, there.path, source)
        files, links = local_folder(source, name) if source.is_dir() else ((local_file(source, name),), ())
        moved = copier.send(files, links)
    return len(files) + len(links), moved


def _remote_name(copier: Copier, written: str, source: Path) -> str:
    path = written.rstrip("/") or "/"
    return f"{path}/{source.resolve().name}" if written.endswith("/") or copier.is_folder(path) else path


def _from_store(cloud: Gpucloud, known: KnownJob, written: str, target: Path, *, recursive: bool) -> tuple[int, int]:
    """Objects of the job in its store: checkpoints, logs, its spec."""
    if written.rstrip("/") != _STORE.rstrip("/") and not written.startswith(_STORE):
        raise UsageError(f"there is no {written}", hint=f"{known.name}:@store/checkpoints/…")
    asker, root = cloud.asker(known), f"jobs/{known.name}/"
    store = asker.jobs.store
    wanted = written.removeprefix(_STORE.rstrip("/")).strip("/")
    everything = [key.removeprefix(root) for key in store.list(root)]
    keys = [key for key in everything if not wanted or key == wanted or key.startswith(f"{wanted}/")]
    if not keys:
        near = get_close_matches(wanted, {*everything, *(key.rpartition("/")[0] for key in everything)}, n=1)
        hint = f"did you mean {known.name}:@store/{near[0]}?" if near else f"gpucloud cp -r {known.name}:@store here"
        raise UsageError(f"the store has no {wanted} of {known.name}", hint=hint)
    if keys != [wanted] and not recursive:
        raise UsageError(f"@store/{wanted} is a folder of {len(keys)} objects", hint="gpucloud cp -r …")
    moved = 0
    for key in keys:
        stored = store.get(root + key)
        if stored is not None:
            place = _store_place(key, wanted, target)
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{place.name}.part")
            beside.write_bytes(stored.data)
            beside.replace(place)
            moved += len(stored.data)
    asker.bill_pull(moved)
    return len(keys), moved


def _store_place(key: str, wanted: str, target: Path) -> Path:
    if key == wanted:
        return target / Path(key).name if target.is_dir() else target
    top = target / Path(wanted).name if target.is_dir() and wanted else target
    return top / key.removeprefix(wanted).lstrip("/")


def _shown(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{format_size(done)} of {format_size(total)}" + ("\n" if done >= total else ""))
        sys.stderr.flush()
