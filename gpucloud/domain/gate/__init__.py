"""The gate: whether a machine's GPUs are known good."""

from gpucloud.domain.gate.wanted import GateFact as GateFact
from gpucloud.domain.gate.wanted import GateWanted as GateWanted
