"""What a checkpoint holds of a training script, as files of tensors: captured, read, put back.

Parameters and optimizer state are replicated (DDP): each rank writes its share of them. Buffers are not (DDP copies
rank 0's only before the next forward pass), nor is anything else: each rank writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gpucloud.domain.errors import UsageError
from gpucloud.resume.layout import pack, size_of, unpack
from gpucloud.resume.tree import Tensors, decode, encode

_FILE_BYTES = 256 * 2**20  # a larger share goes into several files
_OWN = "rank."


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A checkpoint as read by one rank: what all ranks share, and this rank's own part (rank 0's for a new rank)."""

    shared: dict[str, Any]
    own: dict[str, Any]
    own_rank: int


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

    def capture(self, rank: int, world: int, extra: dict[str, Any]) -> Iterator[tuple[str, memoryview]]:
        """Yield this rank's files of a checkpoint, each with its name; `extra` joins the rank's own part."""
        shared_tensors: Tensors = {}
        shared = {
            "modules": {n: encode(self._replicated(m), n, shared_tensors) for n, m in self._modules.items()},
            "optimizers": {n: encode(o.state_dict(), n, shared_tensors) for n, o in self._optimizers.items()},
        }
        own_tensors: Tensors = {}
        own = {
            "buffers": {n: dict(m.named_buffers()) for n, m in self._modules.items()},
            "others": {n: part.state_dict() for n, part in self._others.items()},
            **extra,
        }
        metadata = {"own": json.dumps(encode(own, _OWN[:-1], own_tensors))}
        if rank == 0:
            metadata["shared"] = json.dumps(shared)
        mine = share(shared_tensors, rank, world) | own_tensors
        for number, tensors in enumerate(_filed(mine)):
            yield f"rank-{rank:05d}-of-{world:05d}-{number:03d}.safetensors", pack(tensors, metadata)
            metadata = {}

    def apply(self, content: Content) -> None:
        """Put the state back into the script's objects. Raises UsageError when it does not fit them."""
        for name, module in self._modules.items():
            buffers = content.own["buffers"][name]
            # `state_dict` leaves out buffers that are not persistent; they can matter to the next step all the same.
            persistent = {key: value for key, value in buffers.items() if key in module.state_dict()}
            module.load_state_dict(content.shared["modules"][name] | persistent)
            with torch.no_grad():
                for key, buffer in module.named_buffers():
                    buffer.copy_(buffers[key])
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(content.shared["optimizers"][name])
            optimizer.zero_grad(set_to_none=True)
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


def read(files: Sequence[tuple[str, bytes]], rank: int) -> Content:
    """Return what `rank` needs of a checkpoint's files (name and bytes); ValueError when they do not make one."""
    shared_tensors: Tensors = {}
    own_tensors: dict[int, Tensors] = {}
    notes: dict[int, dict[str, str]] = {}
    for name, data in files:
        owner = int(name.split("-")[1])
        tensors, metadata = unpack(data)
        notes.setdefault(owner, {}).update(metadata)
        for key, tensor in tensors.items():
            (own_tensors.setdefault(owner, {}) if key.startswith(_OWN) else shared_tensors)[key] = tensor
    own_rank = rank if rank in notes else 0
    try:
        shared = json.loads(notes[0]["shared"])
        return Content(
            shared={kind: decode(parts, shared_tensors) for kind, parts in shared.items()},
            own=decode(json.loads(notes[own_rank]["own"]), own_tensors.get(own_rank, {})),
            own_rank=own_rank,
        )
    except KeyError as error:
        raise ValueError(f"a part of the checkpoint is not in its files: {error}") from error


def share(tensors: Tensors, rank: int, world: int) -> Tensors:
    """Return the rank's share of replicated tensors: the largest first, each to the rank with the least so far."""
    loads = [0] * world
    mine: Tensors = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-size_of(item[1]), item[0])):
        least = loads.index(min(loads))
        loads[least] += size_of(tensor)
        if least == rank:
            mine[name] = tensor
    return mine


def _filed(tensors: Tensors) -> Iterator[Tensors]:
    file: Tensors = {}
    size = 0
    for name, tensor in tensors.items():
        if file and size + size_of(tensor) > _FILE_BYTES:
            yield file
            file, size = {}, 0
        file[name] = tensor
        size += size_of(tensor)
    yield file
