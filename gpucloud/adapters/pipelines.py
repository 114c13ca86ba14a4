"""What a repository needs to run gpucloud in CI: the pipeline, gpucloud's own wheel, and a lock of all else by hash.

The runner asks no index for gpucloud: nobody who registers a name there gets its rights. What it asks for is taken only
with the SHA-256 that the lock names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud.adapters.bundled import bundled
from gpucloud.adapters.wheels import wheel_of
from gpucloud.domain.errors import UsageError
from gpucloud.domain.vendoring import Forge, Update, sha256, update

FOLDER = ".gpucloud/ci"
_RECORD = f"{FOLDER}/written.json"
_WITHOUT_WHEELS = ("python-terraform",)
"""What the index has as a source archive only: built on a runner, it would bring unnamed packages along."""

_INCLUDING = f"""\
include:
  - local: {FOLDER}/gitlab-ci.yml
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What became of the repository's files; `to_add` is what its owner must write into a file of his own."""

    root: Path
    update: Update
    wheel: str
    sha256: str
    to_add: tuple[str, str] | None


def install_pipeline(folder: Path, forges: frozenset[Forge], *, force: bool) -> Installed:
    """Put the pipelines and what they install into the repository around `folder`.

    UsageError when a file is in the way: then nothing was written. `force` writes over it.
    """
    root = repository(folder)
    forges = forges or frozenset(_guessed(root))
    if not forges:
        raise UsageError("nothing here says whose CI it is", hint="gpucloud ci init --github, or --gitlab")
    wheel = wheel_of("gpucloud")
    wanted = dict(_wanted(forges, root)) | {f"{FOLDER}/{wheel.name}": wheel.data}
    record = _recorded(root)
    outdated = [path for path in record if path.startswith(f"{FOLDER}/") and path.endswith(".whl")]
    there = {path: data for path in {*wanted, *outdated} if (data := _read(root / path)) is not None}
    found = update(wanted, there, record, outdated)
    if found.in_the_way and not force:
        raise UsageError(
            f"{', '.join(found.in_the_way)}: not as gpucloud wrote it, and what it would write is new",
            hint="move it away and carry your changes over, or --force writes over it",
        )
    for path in (*found.written, *found.in_the_way):
        _write(root / path, wanted[path])
    for path in found.removed:
        (root / path).unlink()
    _remember(root, record, wanted, found)
    include = root / ".gitlab-ci.yml"
    misses = Forge.GITLAB in forges and f"{FOLDER}/gitlab-ci.yml" not in (_read(include) or b"").decode(
        errors="replace"
    )
    return Installed(
        root=root,
        update=found,
        wheel=f"{FOLDER}/{wheel.name}",
        sha256=sha256(wheel.data),
        to_add=(include.name, _INCLUDING) if misses else None,
    )


def repository(folder: Path) -> Path:
    """Return the root of the Git repository that the folder lies in. UsageError outside of one."""
    for root in (folder, *folder.parents):
        if (root / ".git").exists():
            return root
    raise UsageError(f"{folder} is in no Git repository: a CI would not see what is written here", hint="git init")


def _guessed(root: Path) -> Iterator[Forge]:
    if (root / ".github").is_dir():
        yield Forge.GITHUB
    if (root / ".gitlab-ci.yml").exists():
        yield Forge.GITLAB


def _wanted(forges: frozenset[Forge], root: Path) -> Iterator[tuple[str, bytes]]:
    yield f"{FOLDER}/requirements.lock", bundled("templates", "ci", "requirements.lock").read_bytes()
    for project in _WITHOUT_WHEELS:
        wheel = wheel_of(project)
        yield f"{FOLDER}/{wheel.name}", wheel.data
    if Forge.GITHUB in forges:
        yield ".github/workflows/gpucloud.yml", bundled("templates", "ci", "github-actions.yml").read_bytes()
    if Forge.GITLAB in forges:
        yield f"{FOLDER}/gitlab-ci.yml", bundled("templates", "ci", "gitlab-ci.yml").read_bytes()
        if not (root / ".gitlab-ci.yml").exists():  # one that is there is its owner's alone
            yield ".gitlab-ci.yml", _INCLUDING.encode()


def _recorded(root: Path) -> Mapping[str, str]:
    """Return what was written last; what cannot be read says nothing: files are then in the way."""
    try:
        found = json.loads((root / _RECORD).read_bytes())
        return {str(path): str(digest) for path, digest in found["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(root: Path, record: Mapping[str, str], wanted: Mapping[str, bytes], found: Update) -> None:
    left = {path: digest for path, digest in record.items() if path not in found.removed}
    files = left | {path: sha256(data) for path, data in wanted.items()}
    text = json.dumps({"version": 1, "files": dict(sorted(files.items()))}, indent=2) + "\n"
    _write(root / _RECORD, text.encode())


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
