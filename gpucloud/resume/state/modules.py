"""What a module's state is made of: its weights, and the buffers that are a rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpucloud.resume.state.traits import plain
from gpucloud.resume.state.tree import fitted, is_sharded, local

Homes = dict[str, list[tuple[str, torch.nn.Module]]]
"""For each module, those in it that have buffers, with their names there."""


def plain_entries(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's state by plain names. Asked for so, FSDP2 has its parameters in parts, whatever was last."""
    return {plain(key): value for key, value in module.state_dict(keep_vars=True).items()}


def tied(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of what is the same tensor as one before it, each with the name of that."""
    first: dict[int, str] = {}
    return {name: of for name, value in entries.items() if (of := first.setdefault(id(value), name)) != name}


def own_buffers(homes: Homes, entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the buffers that are this rank's own; those that ranks hold together are shared as parameters are."""
    return {
        name: {
            key: local(b) for key, b in buffers_of(of).items() if not (is_sharded(b) and key in entries.get(name, ()))
        }
        for name, of in homes.items()
    }


def weights_of(homes: Homes, entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what of a state_dict() is no buffer of the rank's own."""
    own = own_buffers(homes, entries)
    return {name: {key: value for key, value in e.items() if key not in own[name]} for name, e in entries.items()}


def buffers_of(homes: list[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    """Return the buffers by plain names; as in `named_buffers`, one that several modules have is the first's."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for of, module in homes:
        for name, buffer in module.named_buffers(of, recurse=False):
            found.setdefault(id(buffer), (plain(name), buffer))
    return dict(found.values())


def load(module: torch.nn.Module, weights: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
    """Put the saved weights and the rank's own buffers back, those too that `state_dict` leaves out."""
    targets = module.state_dict(keep_vars=True)
    keys = {plain(key): key for key in targets}
    # `state_dict` leaves out buffers that are not persistent; they can matter to the next step all the same.
    state = weights | {key: value for key, value in buffers.items() if key in keys}
    module.load_state_dict({keys.get(k, k): fitted(v, targets.get(keys.get(k, k))) for k, v in state.items()})
    with torch.no_grad():
        for of, part in module.named_modules():
            for name, buffer in part.named_buffers(recurse=False):
                saved = buffers.get(plain(f"{of}.{name}" if of else name))
                if saved is not None:
                    _put(part, name, buffer, saved)


def _put(module: torch.nn.Module, name: str, buffer: torch.Tensor, saved: torch.Tensor) -> None:
    """Fill the buffer; one that had grown, as a cache of positions does, is put in its place."""
    here = local(buffer)
    if (here.shape, here.dtype) == (saved.shape, saved.dtype) or is_sharded(buffer):
        here.copy_(saved)
    else:
        setattr(module, name, saved.to(here.device))
