"""Fetches Terraform into gpucloud's own folder, for who asks for it: one version, checked before it is unpacked.

The archive must have the SHA-256 that HashiCorp's own list (`SHA256SUMS`, over HTTPS from the same server) names for
it. The list's signature is not verified: the proof is as good as HTTPS to that server.
"""

from __future__ import annotations

import hashlib
import io
import platform
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from gpucloud.domain.errors import ToolMissing

VERSION = "1.11.4"
_SERVER = "https://releases.hashicorp.com/terraform"
_TIMEOUT_S = 60.0
_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_HINT = "install it by hand: https://developer.hashicorp.com/terraform/install"


def install(folder: Path, *, story: Callable[[str], None], server: str = _SERVER, version: str = VERSION) -> Path:
    """Return the program `terraform` in the folder, downloaded and checked. ToolMissing when it cannot be had."""
    archive = f"terraform_{version}_{_platform()}.zip"
    sums = _fetch(f"{server}/{version}/terraform_{version}_SHA256SUMS").decode("ascii", errors="replace")
    wanted = _sum_of(archive, sums)
    story(f"fetching {archive}, SHA-256 {wanted}")
    data = _fetch(f"{server}/{version}/{archive}")
    got = hashlib.sha256(data).hexdigest()
    if got != wanted:
        raise ToolMissing(f"{archive} from {server} has SHA-256 {got}, not {wanted}: it was not installed", hint=_HINT)
    return _unpack(data, folder, archive)


def _platform() -> str:
    system = "darwin" if sys.platform == "darwin" else "linux"
    machine = _MACHINES.get(platform.machine().lower())
    if machine is None:
        raise ToolMissing(f"no Terraform for {platform.machine()} is known here", hint=_HINT)
    return f"{system}_{machine}"


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310  the caller's constant
            return bytes(reply.read())
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the reply too, with its connection
        raise ToolMissing(f"cannot fetch {url}: {error}", hint=_HINT) from error


def _sum_of(archive: str, sums: str) -> str:
    for line in sums.splitlines():
        digest, _, name = line.partition("  ")
        if name.strip() == archive and len(digest) == 64:
            return digest
    raise ToolMissing(f"the list of checksums does not name {archive}", hint=_HINT)


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
