"""What a later node must have to be the same."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.wanted import Wanted


def lock_record(facts: Facts, wanted: Wanted) -> dict[str, object]:
    """Return what a later node must have to be the same, as JSON values."""
    layer = facts.layer
    return {
        "version": 1,
        "package": facts.package,
        "python": ".".join(str(part) for part in facts.version),
        "torch": layer.torch if layer else facts.torch,
        "setup": wanted.setup,
        "setup_digest": wanted.setup_digest if wanted.setup else None,
        "layer": layer.key if layer else None,
        "gpus": [{"name": g.name, "memory_mib": g.memory_mib, "driver": g.driver} for g in facts.gpus or ()],
        "gate": dict(facts.gate.figures) if facts.gate is not None and wanted.gate is not None else None,
    }
