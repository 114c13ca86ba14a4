"""Wheels made again from what is installed here, so that nobody has to ask an index for them by name."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import gpucloud
from gpucloud.adapters.bundled import bundled
from gpucloud.adapters.package import archived
from gpucloud.domain.errors import ToolMissing

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
