"""What this node is and has."""

from __future__ import annotations

import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path

from gpucloud import processes, smi
from gpucloud.agent.attempt import image
from gpucloud.agent.data.staged import staged
from gpucloud.agent.layer.environment import places
from gpucloud.agent.layer.fact import base as base_python
from gpucloud.agent.layer.fact import gpu_kind, layer_fact
from gpucloud.agent.notes import gate_fact, machine_fact
from gpucloud.agent.single_process import agent_process, boots_itself, driver_process, note_visit, package_sha256
from gpucloud.domain.codec import Malformed
from gpucloud.domain.node.bootstrap.facts import Asked, Facts
from gpucloud.domain.node.status import RunState, status_from_json
from gpucloud.wholefile import read_text


def gather(root: Path, *, package: Path | None, asked: Asked) -> Facts:
    """Return the facts."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if asked.visit:
        note_visit(root)
    gpus, fault = smi.gpus()
    base = base_python()
    return Facts(
        python=sys.executable,
        version=tuple(sys.version_info[:3]),
        torch=base.torch,
        root=str(root),
        package=package_sha256(package),
        free_bytes=shutil.disk_usage(root).free,
        cpus=processes.cpus(),
        time=datetime.now(timezone.utc),
        boot_id=processes.boot_id(),
        gpus=gpus,
        gpu_fault=fault,
        stand_in=smi.are_stand_ins(),
        agent_package=agent_process(root).taken_by(),
        agent_busy=is_busy(root),
        layer=layer_fact(places(), asked.layer, base, gpu_kind(gpus)),
        boto3=base.boto3,
        torch_cuda=base.torch_cuda,
        packages=base.packages,
        machine=machine_fact(root),
        staged=staged(root, asked.data),
        image=image.fact(root, asked.image) if asked.image else None,
        gate=gate_fact(root),
        boots_itself=boots_itself(root),
        driver_package=driver_process(root).taken_by(),
    )


def is_busy(root: Path) -> bool:
    """Whether an attempt runs here."""
    try:
        attempt = status_from_json(read_text(root / "agent" / "status.json") or "").attempt
    except Malformed:
        return False
    return attempt is not None and attempt.state is RunState.RUNNING
