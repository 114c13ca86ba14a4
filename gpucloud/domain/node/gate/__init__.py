"""The gate: whether a machine's GPUs are known good."""

from gpucloud.domain.node.gate.findings import GateFact as GateFact
from gpucloud.domain.node.gate.findings import GateWanted as GateWanted
