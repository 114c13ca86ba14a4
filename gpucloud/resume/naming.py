"""Names of weights and of what an optimizer keeps for them, the same whatever wraps the model.

DDP, `torch.compile` and activation checkpointing put their own words into names. Without them, a checkpoint of one
arrangement is one of any other. (`torch.distributed.checkpoint.state_dict` does that too; but it gives an optimizer
without state a step with gradients of zero, even where one is only saved, and takes half a second to import.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_COMPILED = "_orig_mod"
_WORDS = (f"{_COMPILED}.", "_checkpoint_wrapped_module.")


def replicated(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DDP that this is, compiled or not."""
    inner = module._modules.get(_COMPILED, module)  # noqa: SLF001  by attribute, a model's own `_orig_mod` could answer
    return inner if isinstance(inner, DistributedDataParallel) else None


def rebuckets(module: torch.nn.Module) -> bool:
    """Whether a DDP is in it, however deep, that groups its gradients anew after its first backward pass."""
    ddps = (one for one in module.modules() if isinstance(one, DistributedDataParallel))
    return any(ddp.static_graph or not ddp.find_unused_parameters for ddp in ddps)


def plain(name: str) -> str:
    """Return the name of a parameter or buffer as the bare model has it."""
    for word in _WORDS:
        name = name.replace(word, "")
    return name


class GroupsLater(ValueError):
    """The optimizer was given further groups of parameters after `init`."""


def parameter_names(modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer) -> list[str] | None:
    """Return names of the optimizer's parameters, in its order; None when one of them is in none of the modules."""
    names: dict[int, str] = {}
    for of, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{of}.{plain(name)}")
    found = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    known = [name for name in found if name is not None]
    return known if len(known) == len(found) else None


def by_name(state: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """Return an optimizer's state_dict() with names in place of its parameters' numbers, where there are names."""
    if names is None:
        return state
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    kept = {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}


def in_order(state: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """Return what `load_state_dict` takes of what `by_name` returned, for an optimizer with parameters of these names.

    It goes by their order, and takes names as well as numbers. ValueError when the optimizer was one for others,
    GroupsLater when it had more groups.
    """
    if names is None:
        return state
    groups, at = [], 0
    for group in state["param_groups"]:
        now = names[at : at + len(group["params"])]
        at += len(now)
        if not now and group["params"]:
            raise GroupsLater(
                f"the optimizer had got another group later, of {', '.join(map(str, group['params'][:4]))}"
            )
        if any(type(name) is int for name in group["params"]):
            raise ValueError("the optimizer had parameters that are in no module which resume.init was given")
        others = set(map(str, group["params"])) ^ set(now)
        if others:
            raise ValueError(f"the optimizer had other parameters: {', '.join(sorted(others)[:4])}")
        groups.append({**group, "params": now})
    return {**state, "param_groups": groups}
