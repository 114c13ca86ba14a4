"""The Terraform program: where it is, whether it is new enough, and the environment it runs in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gpucloud
from gpucloud.domain.errors import ToolMissing

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
    if "GPUCLOUD_PYTHON" not in kept:
        kept["GPUCLOUD_PYTHON"] = sys.executable
        package = str(Path(gpucloud.__file__).resolve().parent.parent)
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package, kept.get("PYTHONPATH"))))
    return kept | {"CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", "TF_INPUT": "0"}


def _candidates(env: Mapping[str, str], tools: Path | None) -> tuple[Path, ...]:
    named = env.get("GPUCLOUD_TERRAFORM")
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
