"""The gate as a job has it: what its nodes must show, and what a node that is refused means."""

from __future__ import annotations

import os
from dataclasses import replace

from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import GateRefused, NodeError
from gpucloud.domain.gate.check import Checked
from gpucloud.domain.gate.findings import failures, is_machines, why
from gpucloud.domain.gate.wanted import GateWanted
from gpucloud.domain.job import Cloud, GatePolicy, Job
from gpucloud.domain.launch import Script, parse_run
from gpucloud.domain.node import Node


def gate_wanted(job: Job, gpu: str | None) -> GateWanted | None:
    """Return what every node must show; None for a job that neither asks for GPUs nor pays for them (`gpu`)."""
    wanted = job.resources
    if gpu is None and not wanted.gpu and wanted.vram_gib is None:
        return None
    # In a container the job's Python is the image's: what the machine itself shows is looked at.
    own_python = job.image is None
    return GateWanted(
        gpus=wanted.gpus,
        models=(gpu,) if gpu is not None else wanted.gpu,
        vram_gib=wanted.vram_gib,
        full=job.gate is GatePolicy.FULL,
        torch=own_python and isinstance(parse_run(job.run), Script),
    )


def of_node(wanted: Wanted, job: Job, gpu: str | None, node: Node, store_url: str) -> Wanted:
    """Return what is wanted of this very node, by a job that pays for GPUs of the model `gpu` (None: for none)."""
    return replace(of_any_node(wanted, job, gpu, node.pool.region, store_url), devices=node.devices)


def of_any_node(wanted: Wanted, job: Job, gpu: str | None, region: str | None, store_url: str) -> Wanted:
    """Return what is wanted of every node in the region that has its machine for itself."""
    return replace(
        wanted,
        asks_for_gpus=wanted.asks_for_gpus or gpu is not None,
        gate=gate_wanted(job, gpu),
        store_endpoint=store_endpoint(job, store_url, region),
    )


def store_endpoint(job: Job, store_url: str, region: str | None) -> str:
    """Return where the store answers, unless the node or the job names another endpoint; empty for a folder."""
    if not store_url.startswith("s3://"):
        return ""
    env = dict(job.env)
    if job.cloud is not Cloud.AWS:
        region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    suffix = "amazonaws.com.cn" if (region or "").startswith("cn-") else "amazonaws.com"
    return f"https://s3.{region}.{suffix}" if region else f"https://s3.{suffix}"


def refusal(node_id: str, stdout: bytes) -> NodeError:
    """Return the error of a node that the gate refused, with its findings; GateRefused where the fault is its own."""
    checked = parse_checked(stdout)
    failed = failures(checked.findings) if checked is not None else ()
    if checked is None or not failed:
        return NodeError(f"{node_id}: gate: {stdout[-300:].decode(errors='replace')}", hint="run the command again")
    kind = GateRefused if is_machines(failed) else NodeError
    return kind(f"{node_id}: {why(failed)}", hint=failed[0].hint)


def parse_checked(stdout: bytes) -> Checked | None:
    """Return the node's answer, its last line; None for anything else."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(Checked, lines[-1]) if lines else None
    except Malformed:
        return None
