"""What this node is and has."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from gpucloud import processes
from gpucloud.agent import daemon
from gpucloud.agent.layer import installed_version, layer_fact
from gpucloud.agent.wholefile import read_text
from gpucloud.domain.agentstatus import RunState, status_from_json
from gpucloud.domain.bootstrap import Facts, Gpu
from gpucloud.domain.codec import Malformed
from gpucloud.domain.layer import layer_key, suffices

_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_GPU_TIMEOUT_S = 20.0  # a driver that hangs must not hang the bootstrap


def gather(root: Path, *, package: Path | None, digest: str = "", unless_boto3: str = "") -> Facts:
    """Return the facts; `digest` is that of the job's layer, empty for none.

    `unless_boto3` is that of a layer that is wanted for boto3 only, where the base interpreter has none that suffices.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    gpus, fault = _gpus()
    is_running, agent_package = daemon.running(root)
    version = tuple(sys.version_info[:3])
    boto3 = installed_version("boto3", sys.path)
    digest = digest or ("" if suffices(boto3) else unless_boto3)
    return Facts(
        python=sys.executable,
        version=version,
        torch=installed_version("torch", sys.path),
        root=str(root),
        package=package_sha256(package),
        free_bytes=shutil.disk_usage(root).free,
        cpus=os.cpu_count() or 1,
        time=datetime.now(timezone.utc),
        boot_id=processes.boot_id(),
        gpus=gpus,
        gpu_fault=fault,
        agent_package=(agent_package or "unknown") if is_running else None,
        agent_busy=_is_busy(root),
        layer=layer_fact(root, layer_key(digest, sys.executable, version)) if digest else None,
        boto3=boto3,
    )


def package_sha256(package: Path | None) -> str:
    """Return the hash of the zip that runs; empty for code that was not read from one."""
    return hashlib.sha256(package.read_bytes()).hexdigest() if package else ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the devices in the answer of `nvidia-smi` to our query; ValueError for any other text."""
    gpus = []
    for line in text.strip().splitlines():
        name, memory, driver = (part.strip() for part in line.rsplit(",", 2))
        gpus.append(Gpu(name=name, memory_mib=int(memory) if memory.isdecimal() else 0, driver=driver))
    return tuple(gpus)


def _gpus() -> tuple[tuple[Gpu, ...] | None, str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    try:
        answer = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=False)
        if answer.returncode == 0:
            return parse_gpus(answer.stdout), None
    except subprocess.TimeoutExpired:
        return (), f"no answer within {_GPU_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        return (), str(error)
    return (), f"exit code {answer.returncode}: {(answer.stdout + answer.stderr).strip()[:200]}"


def _is_busy(root: Path) -> bool:
    try:
        attempt = status_from_json(read_text(root / "agent" / "status.json") or "").attempt
    except Malformed:
        return False
    return attempt is not None and attempt.state is RunState.RUNNING
