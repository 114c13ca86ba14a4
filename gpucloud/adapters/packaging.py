"""gpucloud packed: the zip that nodes run, wheels made again from what is installed, a repository's CI."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import gpucloud
from gpucloud.adapters.home import bundled
from gpucloud.domain.errors import ToolMissing, UsageError

_LEFT_OUT = ("bundled", "adapters/markets/recordings")
"""What only a user's command reads: templates and Terraform's modules, recorded markets."""

_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that the format knows: equal files make equal bytes

# Written for any Python 3, so that an old one can say what it is.
_MAIN = """\
import sys

if sys.version_info < (3, 10):
    import json

    print(json.dumps({"python": sys.executable, "version": sys.version_info[:3]}))
    sys.exit(0)

from gpucloud.agent.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


def package_zip() -> tuple[bytes, str]:
    """Return the zip and its SHA-256; the same source always gives the same bytes.

    `python3 <zip> agent|facts|layer|machine …` runs it, `PYTHONPATH=<zip>` makes `import gpucloud.resume` work.
    """
    root = Path(gpucloud.__file__).parent
    sources = {"__main__.py": _MAIN.encode()}
    # Prices, since a machine that drives its job counts money, and the lock of what it installs for that.
    for path in (*root.rglob("*.py"), *root.rglob("*.json"), *root.rglob("*.lock")):
        name = path.relative_to(root)
        if not any(name.is_relative_to(folder) for folder in _LEFT_OUT):
            sources[f"gpucloud/{name.as_posix()}"] = path.read_bytes()
    data = archived(sources)
    return data, hashlib.sha256(data).hexdigest()


def archived(sources: Mapping[str, bytes]) -> bytes:
    """Return a zip of the files; equal files make equal bytes, wherever and whenever it is made."""
    buffer = io.BytesIO()
    # Stored, not deflated: zlib's output differs between its versions, and imports from the zip are faster.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, date_time=_DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


# Wheels made again from what is installed here, so that nobody has to ask an index for them by name.


_OF_THE_INSTALLER = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json")
_BUNDLED = ("terraform", "templates")
_NOT_SHIPPED = re.compile(r"(^|/)(__pycache__|\.terraform)(/|$)|\.tfstate(\.|$)|\.py[co]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel for any Python 3 and platform: its file's name and bytes, which are the same for the same files."""

    name: str
    data: bytes


def wheel_of(project: str) -> Wheel:
    """Return the wheel of an installed project of pure Python; ToolMissing when it cannot be made again as it was.

    What was changed after it had been installed is refused. gpucloud itself may also run from a checkout.
    """
    try:
        found = distribution(project)
    except PackageNotFoundError as error:
        raise ToolMissing(
            f"{project} is not installed, only there to be imported",
            hint="install it with pip, from its folder or wheel",
        ) from error
    info = f"{project.replace('-', '_')}-{found.version}.dist-info"
    content = _of_a_checkout(found) if project == "gpucloud" and _runs_from_a_checkout(found) else _as_recorded(found)
    files = dict(content)
    files |= {f"{info}/{name}": data for name, data in _metadata(found)}
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: gpucloud {gpucloud.__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ).encode()
    files[f"{info}/RECORD"] = _record(files, info)
    return Wheel(name=f"{info.removesuffix('.dist-info')}-py3-none-any.whl", data=archived(files))


def _runs_from_a_checkout(found: Distribution) -> bool:
    """Whether the code that runs is not what the installer wrote: an editable install, or a checkout on the path."""
    running = Path(gpucloud.__file__).resolve()
    recorded = any(str(file) == "gpucloud/__init__.py" for file in found.files or ())
    return not recorded or Path(str(found.locate_file("gpucloud/__init__.py"))).resolve() != running


def _of_a_checkout(found: Distribution) -> Iterator[tuple[str, bytes]]:
    """As the wheel's recipe in pyproject.toml has it: the package, and what it brings along."""
    if found.version != gpucloud.__version__:
        raise ToolMissing(
            f"the checkout is gpucloud {gpucloud.__version__}, and {found.version} is what was installed of it",
            hint="pip install -e . once more, in the checkout",
        )
    package = Path(gpucloud.__file__).resolve().parent
    yield from _tree(package, "gpucloud")
    for name in _BUNDLED:
        yield from _tree(bundled(name), f"gpucloud/bundled/{name}")


def _tree(folder: Path, below: str) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _NOT_SHIPPED.search(name):
            yield f"{below}/{name}", path.read_bytes()


def _as_recorded(found: Distribution) -> Iterator[tuple[str, bytes]]:
    """What the installer wrote, but what lies outside (scripts, which are made anew) and compiled files."""
    for file in found.files or ():
        name = PurePosixPath(str(file))
        is_outside = ".." in name.parts or name.is_absolute()
        if is_outside or name.parts[0].endswith((".dist-info", ".egg-info")) or _NOT_SHIPPED.search(str(name)):
            continue
        data = Path(str(found.locate_file(file))).read_bytes()
        if file.hash is not None and _sum(data) != file.hash.value:
            raise ToolMissing(
                f"{name} of {found.metadata['Name']} is not what was installed",
                hint=f"pip install --force-reinstall {found.metadata['Name']}",
            )
        yield str(name), data


def _metadata(found: Distribution) -> Iterator[tuple[str, bytes]]:
    for file in found.files or ():
        parts = PurePosixPath(str(file)).parts
        if parts[0].endswith(".dist-info") and parts[1:] and parts[-1] not in (*_OF_THE_INSTALLER, "WHEEL"):
            yield "/".join(parts[1:]), Path(str(found.locate_file(file))).read_bytes()


def _record(files: dict[str, bytes], info: str) -> bytes:
    lines = [f"{name},sha256={_sum(data)},{len(data)}\n" for name, data in sorted(files.items())]
    return "".join([*lines, f"{info}/RECORD,,\n"]).encode()


def _sum(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# What a repository needs to run gpucloud in CI: the pipeline, gpucloud's own wheel, and a lock of all else by hash.
#
# The runner asks no index for gpucloud: nobody who registers a name there gets its rights. What it asks for is taken
# only with the SHA-256 that the lock names.


FOLDER = ".gpucloud/ci"
_RECORD = f"{FOLDER}/written.json"
_WITHOUT_WHEELS = ("python-terraform",)
"""What the index has as a source archive only: built on a runner, it would bring unnamed packages along."""

_INCLUDING = f"""\
include:
  - local: {FOLDER}/gitlab-ci.yml
"""


class Forge(str, Enum):
    """Whose CI."""

    GITHUB = "github"
    GITLAB = "gitlab"


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


# What becomes of each of those files when it is written anew: what was edited in the repository stays.


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What becomes of each path: written, removed, kept since only its owner changed it, or in the way."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    in_the_way: tuple[str, ...]


def update(
    wanted: Mapping[str, bytes], there: Mapping[str, bytes], record: Mapping[str, str], outdated: Collection[str]
) -> Update:
    """Return what to do; `record` has the SHA-256 of each file as it was written last, `outdated` what may go.

    A file that is there is written over if it is as it was written last. One that was edited since is kept where what
    is wanted is what was written then: only its owner has changed it. It is in the way where both have.
    """
    written, kept, in_the_way = [], [], []
    for path, data in wanted.items():
        now = there.get(path)
        if now == data:
            continue
        if now is None or sha256(now) == record.get(path):
            written.append(path)
        elif sha256(data) == record.get(path):
            kept.append(path)
        else:
            in_the_way.append(path)
    removed = [
        path for path in outdated if path not in wanted and path in there and _is_ours(there[path], path, record)
    ]
    return Update(
        written=tuple(written), removed=tuple(sorted(removed)), kept=tuple(kept), in_the_way=tuple(in_the_way)
    )


def sha256(data: bytes) -> str:
    """Return the hash that a record holds."""
    return hashlib.sha256(data).hexdigest()


def _is_ours(data: bytes, path: str, record: Mapping[str, str]) -> bool:
    return sha256(data) == record.get(path)
