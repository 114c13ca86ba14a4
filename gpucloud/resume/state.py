"""What a checkpoint holds of a training script: collected, and put back.

Parameters and optimizer state are replicated (DDP): each rank writes its share of them. Buffers are not (DDP copies
rank 0's only before the next forward pass), nor is anything else: each rank writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gpucloud.domain.errors import UsageError
from gpucloud.resume.layout import size_of
from gpucloud.resume.tree import Tensors, encode

OWN = "rank."
"""How the names of a rank's own tensors begin; another rank's have the same names, in another object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A checkpoint as read by one rank: what all ranks share, and this rank's own part (rank 0's for a new rank).

    `shared` returns the states of a kind, `modules` or `optimizers`, by name: memory that nobody else uses.
    """

    shared: Callable[[str], dict[str, Any]]
    own: dict[str, Any]
    own_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one rank writes: its share of what all ranks have, its own tensors, and the rest as JSON texts."""

    shared: Tensors
    own: Tensors
    metadata: dict[str, str]


class TrainingState:
    """The objects of one script whose state makes a run: `parts` by name, anything with state_dict()."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                self._modules[name] = part.module if isinstance(part, DistributedDataParallel) else part
            elif isinstance(part, torch.optim.Optimizer):
                self._optimizers[name] = part
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._others[name] = part
            else:
                raise UsageError(
                    f"init({name}=…) was given a {type(part).__name__}, which has no state",
                    hint=f"give {name} the methods state_dict() and load_state_dict(), or leave it out",
                )

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those whose steps change what is shared."""
        return tuple(self._optimizers.values())

    def collect(self, rank: int, world: int, extra: dict[str, Any]) -> Collected:
        """Return what this rank writes of a checkpoint, not copied; `extra` joins the rank's own part."""
        shared: Tensors = {}
        trees = {
            "modules": {n: encode(self._replicated(m), n, shared) for n, m in self._modules.items()},
            "optimizers": {n: encode(o.state_dict(), n, shared) for n, o in self._optimizers.items()},
            "names": {n: list(m.state_dict()) for n, m in self._modules.items()},  # buffers among them, in its order
        }
        own: Tensors = {}
        part = {
            "buffers": {n: dict(m.named_buffers()) for n, m in self._modules.items()},
            "others": {n: part.state_dict() for n, part in self._others.items()},
            **extra,
        }
        metadata = {"own": json.dumps(encode(part, OWN[:-1], own))}
        if rank == 0:
            metadata["shared"] = json.dumps(trees)
        return Collected(shared=share(shared, rank, world), own=own, metadata=metadata)

    def apply(self, content: Content) -> None:
        """Put the state back into the script's objects. Raises UsageError when it does not fit them."""
        modules = content.shared("modules")
        for name, module in self._modules.items():
            buffers = content.own["buffers"][name]
            # `state_dict` leaves out buffers that are not persistent; they can matter to the next step all the same.
            persistent = {key: value for key, value in buffers.items() if key in module.state_dict()}
            module.load_state_dict(modules[name] | persistent)
            with torch.no_grad():
                for key, buffer in module.named_buffers():
                    buffer.copy_(buffers[key])
        del modules
        optimizers = content.shared("optimizers")
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(optimizers.pop(name))
            optimizer.zero_grad(set_to_none=True)
        self.apply_others(content)

    def apply_others(self, content: Content) -> None:
        """Put back what is neither module nor optimizer: schedulers, scalers and the like."""
        for name, part in self._others.items():
            part.load_state_dict(content.own["others"][name])

    def fit(self, content: Content, step: int) -> None:
        """Apply; a checkpoint of another model becomes a UsageError that says so."""
        try:
            self.apply(content)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise UsageError(
                f"the checkpoint of step {step} does not fit this script: {error}",
                hint="undo the change of model, optimizer or scheduler, or start a new run",
            ) from error

    @staticmethod
    def _replicated(module: torch.nn.Module) -> dict[str, Any]:
        buffers = {name for name, _ in module.named_buffers()}
        return {key: value for key, value in module.state_dict().items() if key not in buffers}


def share(tensors: Tensors, rank: int, world: int) -> Tensors:
    """Return the rank's share of replicated tensors: the largest first, each to the rank with the least so far."""
    if world == 1:
        return tensors
    loads = [0] * world
    mine: Tensors = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-size_of(item[1]), item[0])):
        least = loads.index(min(loads))
        loads[least] += size_of(tensor)
        if least == rank:
            mine[name] = tensor
    return mine
