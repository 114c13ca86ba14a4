"""What a module's state is made of: its weights, the buffers that are a rank's own, and what no `state_dict` has of it.

Some of a module or an optimizer changes as it trains and stands in no `state_dict`: what is frozen, settings of layers.
Of torch's own layers those are numbers, as the momentum of BatchNorm and the share that Dropout leaves out, and whether
a layer trains or evaluates, where that is not as in the whole model. Of optimizers those are numbers too, as a count of
their steps. What a script's own modules keep beside that may be of this process alone, as how long a cache is, and is
left to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

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


# Names of weights and of what an optimizer keeps for them, the same whatever wraps the model.
#
# DDP, `torch.compile` and activation checkpointing put their own words into names. Without them, a checkpoint of one
# arrangement is one of any other. (`torch.distributed.checkpoint.state_dict` does that too; but it gives an optimizer
# without state a step with gradients of zero, even where one is only saved, and takes half a second to import.)


_COMPILED = "_orig_mod"
_WORDS = (f"{_COMPILED}.", "_checkpoint_wrapped_module.")


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


# What changes as they train and no `state_dict` has, and how a DDP treats what it wraps.


_OF_TORCH = "torch.nn.modules."
_FROZEN, _MODE = "requires_grad", "training"


class Traits:
    """What so changes of a script's objects, which are as the script has them before the run when this is made."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Any]) -> None:
        self._all = [trait for of, module in modules.items() for trait in _traits(of, module)]
        self._all += [trait for of, optimizer in optimizers.items() for trait in _counts(of, optimizer)]

    def changed(self) -> dict[str, bool | float]:
        """Return those that are others now than before the run."""
        return {trait.key: trait.now for trait in self._all if trait.tells and trait.now != trait.before}

    def others(self, changed: Mapping[str, Any]) -> list[str]:
        """Return which of them are not so now."""
        return [trait.key for trait in self._all if changed.get(trait.key, trait.now) != trait.now]

    def put_back(self, changed: Mapping[str, Any]) -> None:
        """Set them as they were when `changed` returned this; what is of another kind or of no layer here stays."""
        for trait in self._all:
            value = changed.get(trait.key)
            if type(value) is type(trait.before):
                setattr(trait.of, trait.name, value)


def is_frozen(key: str) -> bool:
    """Whether this says of a parameter that it is frozen, or not."""
    return key.endswith(f".{_FROZEN}")


def fixed(module: torch.nn.Module) -> bool:
    """Whether a DDP in it waits for the gradients of all that was not frozen as it was made."""
    return any(isinstance(one, DistributedDataParallel) and not one.find_unused_parameters for one in module.modules())


def replicated(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DDP that this is, compiled or not."""
    inner = module._modules.get(_COMPILED, module)  # noqa: SLF001  by attribute, a model's own `_orig_mod` could answer
    return inner if isinstance(inner, DistributedDataParallel) else None


def rebuckets(module: torch.nn.Module) -> bool:
    """Whether a DDP is in it, however deep, that groups its gradients anew after its first backward pass."""
    ddps = (one for one in module.modules() if isinstance(one, DistributedDataParallel))
    return any(ddp.static_graph or not ddp.find_unused_parameters for ddp in ddps)


@dataclass(frozen=True, slots=True)
class _Trait:
    """A setting, whose it is, and how it was before the run; `root` is the whole model."""

    key: str
    of: Any
    name: str
    before: bool | float
    root: torch.nn.Module | None = None

    @property
    def now(self) -> bool | float:
        value: bool | float = getattr(self.of, self.name)
        return value

    @property
    def tells(self) -> bool:
        """Whether it is what it is in training: a model that evaluates has all its layers do so."""
        return self.root is None or self.root.training


def _traits(of: str, root: torch.nn.Module) -> Iterator[_Trait]:
    for name, parameter in root.named_parameters():
        yield _Trait(f"{of}.{plain(name)}.{_FROZEN}", parameter, _FROZEN, parameter.requires_grad)
    for name, part in root.named_modules():
        place = f"{of}.{plain(name)}"
        if root.training and part is not root:
            yield _Trait(f"{place}.{_MODE}", part, _MODE, part.training, root)
        if type(part).__module__.startswith(_OF_TORCH):
            numbers = {key: value for key, value in vars(part).items() if type(value) is float}
            yield from (_Trait(f"{place}.{key}", part, key, value) for key, value in numbers.items())


def _counts(of: str, optimizer: Any) -> Iterator[_Trait]:
    for key, value in vars(optimizer).items():
        if type(value) in (int, float) and not key.startswith("_"):
            yield _Trait(f"{of}.{key}", optimizer, key, value)
