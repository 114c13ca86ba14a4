"""What a machine must show at the gate, and what is kept of it when it did."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.codec import to_json
from gpucloud.domain.hardware.gpus import Gpu

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The variables by which boto3 is told of another endpoint, the first one first (AWS SDKs, service endpoints)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateWanted:
    """What a machine must show: `gpus` devices, of one of `models` if any was asked for or paid for.

    `full`: compute and collectives are tried too. `torch`: the job needs it, on those devices.
    """

    gpus: int
    models: tuple[str, ...] = ()
    vram_gib: int | None = None
    full: bool = True
    torch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOrder:
    """What the node's `gate` command is told, on its standard input.

    `python` is the job's, `devices` the GPUs that are the node's as CUDA_VISIBLE_DEVICES takes them (empty: as the
    environment says), `store` the store's endpoint (`https://host:port`, empty for none) where neither `env`, the job's
    own words about it, nor the machine's environment names another. `digest` names what is asked.
    """

    wanted: GateWanted
    digest: str
    python: str
    devices: tuple[str, ...] = ()
    store: str = ""
    env: tuple[tuple[str, str], ...] = ()
    sudo: bool = False


LASTS = timedelta(days=7)
"""How long a check counts on a machine that is not booted anew: own hosts run for months."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFact:
    """What the last full check on this boot passed: the digest of what was asked, when, its figures and remarks.

    `newest` is what the kernel's log had told by then (`Report.newest`).
    """

    digest: str
    at: datetime
    newest: float | None = None
    figures: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()


def store_endpoint(order: GateOrder, environ: Mapping[str, str]) -> str:
    """Return where boto3 in the job will look for the store on a machine with this environment; empty for none."""
    said = {**environ, **dict(order.env)}
    named = next((said[name] for name in ENDPOINTS if said.get(name)), "")
    return (named or order.store) if order.store else ""


def gate_digest(wanted: GateWanted, python: str, gpus: tuple[Gpu, ...], devices: tuple[str, ...] = ()) -> str:
    """Return the name of a check: another Python or driver, other devices or fewer of them must pass it anew."""
    driver = gpus[0].driver if gpus else ""
    uuids = ",".join(sorted(gpu.uuid for gpu in gpus))
    text = "\n".join((to_json(wanted), python, driver, uuids, ",".join(devices)))
    return hashlib.sha256(text.encode()).hexdigest()
