"""The Terraform program: where it is, how it is fetched, and that one runs at a time in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gpucloud
from gpucloud.domain.errors import ProvisionError, ToolMissing
from gpucloud.domain.node.layer import PinnedFile
from gpucloud.domain.variables import GPUCLOUD_PYTHON, GPUCLOUD_TERRAFORM
from gpucloud.system.processes import try_lock
from gpucloud.system.wholefile import write_whole

_LEAST = (1, 5)
# Variables that would change what a command means, or put other text where events are expected.
_UNWANTED = re.compile(r"TF_(VAR_.*|CLI_ARGS.*|WORKSPACE|DATA_DIR|LOG.*)")


def find_terraform(env: Mapping[str, str] | None = None, tools: Path | None = None) -> Path | None:
    """Return the program that GPUCLOUD_TERRAFORM names (ToolMissing when it is not there), else the one on PATH.

    Else the one that `gpucloud tools install` has put into the folder `tools`.
    """
    return next(iter(_candidates(os.environ if env is None else env, tools)), None)


def require_terraform(
    env: Mapping[str, str], cache: Path, *, least: tuple[int, int] = _LEAST, tools: Path | None = None
) -> Path:
    """Return the program, checked to be new enough; `cache` is the file that remembers its version."""
    candidates = _candidates(env, tools)
    if not candidates:
        raise ToolMissing("Terraform is not installed", hint=_install(least))
    old = ""
    for program in candidates:
        version = _known_version(program, env, cache, least)
        if tuple(int(part) for part in version.split(".")[:2]) >= least:
            return program
        old = old or f"{program} is Terraform {version}, which is too old"
    raise ToolMissing(old, hint=_install(least))


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Terraform: quiet, unattended, the caller's settings that would break it left out."""
    kept = {name: value for name, value in env.items() if not _UNWANTED.fullmatch(name)}
    config = kept.get("TF_CLI_CONFIG_FILE")
    if config and not Path(config).is_file():
        del kept["TF_CLI_CONFIG_FILE"]  # Terraform would only warn, in the middle of its events
    if GPUCLOUD_PYTHON not in kept:
        kept[GPUCLOUD_PYTHON] = sys.executable
        package = str(Path(gpucloud.__file__).resolve().parent.parent)
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package, kept.get("PYTHONPATH"))))
    # A provider makes thousands of schemas at each start. With garbage collected a quarter as often, a plan on AWS
    # computes a fifth less (5.1 to 4.1 s) and takes 20 MB more.
    kept.setdefault("GOGC", "400")
    return kept | {"CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", "TF_INPUT": "0"}


def _candidates(env: Mapping[str, str], tools: Path | None) -> tuple[Path, ...]:
    named = env.get(GPUCLOUD_TERRAFORM)
    found = shutil.which(named or "terraform", path=env.get("PATH"))
    if named:
        if found is None:
            raise ToolMissing(f"GPUCLOUD_TERRAFORM names {named}, which is not a program", hint=_install(_LEAST))
        return (Path(found).absolute(),)
    own = tools / "terraform" if tools else None
    return (*((Path(found).absolute(),) if found else ()), *((own,) if own and own.is_file() else ()))


def _install(least: tuple[int, int]) -> str:
    version = f"Terraform {least[0]}.{least[1]} or newer"
    link = "https://developer.hashicorp.com/terraform/install"
    return f"`gpucloud tools install`, or install {version} ({link}), or set GPUCLOUD_TERRAFORM"


def _known_version(program: Path, env: Mapping[str, str], cache: Path, least: tuple[int, int]) -> str:
    stamp = f"{program} {program.stat().st_mtime_ns} "
    remembered = _remembered(cache) or ""
    if remembered.startswith(stamp):
        return remembered.removeprefix(stamp)
    version = _version(program, env, least)
    with contextlib.suppress(OSError):  # then it is asked again the next time
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache.write_text(stamp + version)
    return version


def _remembered(cache: Path) -> str | None:
    try:
        return cache.read_text()
    except OSError:
        return None


def _version(program: Path, env: Mapping[str, str], least: tuple[int, int]) -> str:
    try:
        done = subprocess.run(
            [str(program), "version", "-json"],
            env=environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=True,
        )
        version = str(json.loads(done.stdout)["terraform_version"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        raise ToolMissing(f"{program} does not answer as Terraform does: {error}", hint=_install(least)) from error
    if not re.match(r"\d+\.\d+", version):
        raise ToolMissing(f"{program} has no version that can be read: {version}", hint=_install(least))
    return version


# Fetches Terraform into gpucloud's own folder, for who asks for it: one version, by the SHA-256 that is known here.
#
# Where the archive comes from does not matter: what is not that very file is not unpacked.


TERRAFORM_VERSION = "1.11.4"
# By Terraform's own names of platforms, as several public projects pin HashiCorp's archives (2026-11). The program in
# the first has the SHA-256 that they name for it: 268000fca5c6….
TERRAFORM = {
    "linux_amd64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_linux_amd64.zip",
        sha256="1ce994251c00281d6845f0f268637ba50c0005657eb3cf096b92f753b42ef4dc",
    ),
    "linux_arm64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_linux_arm64.zip",
        sha256="a43d1d0da9b9bab214a8305a39db0e40869572594ccf50c416a7756499143633",
    ),
    "darwin_amd64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_darwin_amd64.zip",
        sha256="a56d5002b9f7647291faccc3dd1a70350e60fb61e4c45037629508b8fdc2575b",
    ),
    "darwin_arm64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_darwin_arm64.zip",
        sha256="867e0808fa971217043e25b7a792b10720c79b1546f8a68479b74f138be73e18",
    ),
}

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
        write_whole(folder / "terraform", program, mode=0o755)
        return folder / "terraform"
    except (zipfile.BadZipFile, KeyError) as error:
        raise ToolMissing(f"{archive} is not an archive with Terraform in it: {error}", hint=_HINT) from error
    except OSError as error:
        raise ToolMissing(f"cannot write {folder}: {error.strerror}", hint="GPUCLOUD_HOME names another") from error


# One Terraform at a time per working folder, on this machine.


_POLL_S = 0.02


@contextlib.contextmanager
def alone(folder: Path, *, limit_s: float, story: Callable[[str], None]) -> Iterator[int]:
    """Hold the folder's lock, which outlives this process while a Terraform that it started still runs.

    Gives the lock's descriptor. ProvisionError when it is not free within `limit_s`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(fd, folder, limit_s, story)
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path, limit_s: float, story: Callable[[str], None]) -> None:
    deadline = time.monotonic() + limit_s
    told = False
    while not try_lock(fd):
        if not told:
            story(f"another Terraform run for {folder.name} has not ended; waiting for it")
            told = True
        if time.monotonic() > deadline:
            raise ProvisionError(
                f"another Terraform run for {folder.name} has not ended after {limit_s:.0f} s",
                hint=f"see the newest file in {folder / 'logs'}",
            )
        time.sleep(_POLL_S)
