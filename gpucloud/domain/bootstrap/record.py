"""What a later node must have to be the same."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.wanted import Wanted


def lock_record(facts: Facts, wanted: Wanted) -> dict[str, object]:
    """Return what a later node must have to be the same, as JSON values; no secrets, and nothing of this node alone."""
    layer = facts.layer
    machine = facts.machine
    return {
        "version": 1,
        "package": facts.package,
        "python": ".".join(str(part) for part in facts.version),
        "torch": layer.torch if layer else facts.torch,
        "setup": wanted.setup,
        "setup_digest": wanted.setup_digest if wanted.setup else None,
        "conda": wanted.conda,
        "layer": layer.key if layer else None,
        "torch_cuda": layer.torch_cuda if layer else facts.torch_cuda,
        "torch_index": layer.torch_index if layer else None,
        "uv": layer.uv if layer else None,
        "packages": list(layer.packages) if layer else [],
        "base_packages": list(facts.packages),
        "image": facts.image.pinned if facts.image else None,
        "machine": dict(machine.versions) if machine else None,
        "gpus": [{"name": g.name, "memory_mib": g.memory_mib, "driver": g.driver} for g in facts.gpus or ()],
        "gate": dict(facts.gate.figures) if facts.gate is not None and wanted.gate is not None else None,
    }


def attempt_lock(locks: dict[str, dict[str, object]], seconds: dict[str, dict[str, float]]) -> dict[str, object]:
    """Return one record for an attempt's nodes: those that are made alike stand together; JSON values.

    `seconds` says how long each phase took, by node.
    """
    machines: list[dict[str, object]] = []
    for node_id, lock in locks.items():
        alike = next((one for one in machines if one["lock"] == lock), None)
        if alike is None:
            machines.append({"nodes": [node_id], "lock": lock})
        else:
            alike["nodes"] = [*_listed(alike["nodes"]), node_id]
    return {"version": 1, "machines": machines, "seconds": {name: dict(took) for name, took in seconds.items()}}


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
