"""Fetches Terraform into gpucloud's own folder, for who asks for it: one version, by the SHA-256 that is known here.

Where the archive comes from does not matter: what is not that very file is not unpacked.
"""

from __future__ import annotations

import hashlib
import io
import platform
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from gpucloud.domain.errors import ToolMissing
from gpucloud.domain.pinned import TERRAFORM, TERRAFORM_VERSION, PinnedFile

_SERVER = "https://releases.hashicorp.com/terraform"
_TIMEOUT_S = 60.0
_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_HINT = "install it by hand: https://developer.hashicorp.com/terraform/install"


def install(
    folder: Path, *, story: Callable[[str], None], server: str = _SERVER, pinned: Mapping[str, PinnedFile] = TERRAFORM
) -> Path:
    """Return the program `terraform` in the folder, downloaded and checked. ToolMissing when it cannot be had."""
    archive = _archive(pinned)
    story(f"fetching {archive.name}, SHA-256 {archive.sha256}")
    data = _fetch(f"{server}/{TERRAFORM_VERSION}/{archive.name}")
    got = hashlib.sha256(data).hexdigest()
    if got != archive.sha256:
        raise ToolMissing(
            f"{archive.name} from {server} has SHA-256 {got}, not {archive.sha256}: it was not installed", hint=_HINT
        )
    return _unpack(data, folder, archive.name)


def _archive(pinned: Mapping[str, PinnedFile]) -> PinnedFile:
    system = "darwin" if sys.platform == "darwin" else "linux"
    machine = _MACHINES.get(platform.machine().lower(), platform.machine())
    found = pinned.get(f"{system}_{machine}")
    if found is None:
        raise ToolMissing(f"no Terraform for {system} on {machine} is known here", hint=_HINT)
    return found


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310  the caller's constant
            return bytes(reply.read())
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the reply too, with its connection
        raise ToolMissing(f"cannot fetch {url}: {error}", hint=_HINT) from error


def _unpack(data: bytes, folder: Path, archive: str) -> Path:
    try:
        program = zipfile.ZipFile(io.BytesIO(data)).read("terraform")
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / "terraform.new"
        beside.write_bytes(program)
        beside.chmod(0o755)
        return beside.replace(folder / "terraform")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ToolMissing(f"{archive} is not an archive with Terraform in it: {error}", hint=_HINT) from error
    except OSError as error:
        raise ToolMissing(f"cannot write {folder}: {error.strerror}", hint="GPUCLOUD_HOME names another") from error
