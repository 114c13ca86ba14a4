"""What a checkpoint holds of a training script: collected, and put back.

Parameters and optimizer state are replicated (DDP), or ranks hold them together (FSDP2): each rank writes its share of
them. Buffers are not (DDP copies rank 0's only before the next forward pass), nor is anything else: each rank writes
its own, but for tensors in it that ranks hold together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from gpucloud.domain.checkpoint.chunks import OWN, STAGES
from gpucloud.domain.errors import UsageError
from gpucloud.resume.state.modules import (
    GroupsLater,
    Homes,
    Traits,
    by_name,
    fixed,
    in_order,
    is_frozen,
    load,
    own_buffers,
    parameter_names,
    plain_entries,
    replicated,
    tied,
    weights_of,
)
from gpucloud.resume.state.randomness import Generator, is_generator, own_generator
from gpucloud.resume.state.stages import (
    Places,
    keep_trials_apart,
    module_of,
    place_of,
    require_known,
    stage_of,
)
from gpucloud.resume.state.tree import (
    REPLICATED,
    Layout,
    Shares,
    Tensors,
    arrangement,
    encode,
    is_sharded,
    layout_of,
    leaves,
    renamed,
    share,
)

TIED = "tied"
"""What says which names of a module are those of one tensor."""

Groups = dict[str, list[dict[str, Any]]]
"""For each optimizer, the settings of its groups of parameters."""

_ALL_GROUPS = (
    "give the optimizer all groups before resume.init: what is frozen until later (requires_grad=False) is left alone; "
    "and unfreeze by run.steps_done, which a resumed run has at once"
)


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
    """What one rank writes: its share of what all ranks have, its own tensors, and the rest as JSON texts.

    `names` are those of all that is shared, each with its shape.
    """

    shared: Tensors
    own: Tensors
    metadata: dict[str, str]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The state as it is: all of it that ranks share, and the rank's own; as JSON, its tensors apart."""

    shared_tree: dict[str, Any]
    shared: Tensors
    own_tree: dict[str, Any]
    own: Tensors


class TrainingState:
    """The objects of one script whose state makes a run: `parts` by name, anything with state_dict()."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}
        self._stages: dict[str, tuple[int, int]] = {}
        for name, given in parts.items():
            part = module_of(given)
            if (stage := stage_of(given)) is not None:
                self._stages[name] = place_of(stage)
                keep_trials_apart(stage)
            if isinstance(part, torch.nn.Module):
                self._modules[name] = _checked(part, name)
            elif isinstance(part, torch.optim.Optimizer):
                self._optimizers[name] = _bare(part, name)
            elif is_generator(part):
                self._others[name] = Generator(part)
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._others[name] = part
            else:
                raise UsageError(
                    f"init({name}=…) was given a {type(part).__name__}, which has no state",
                    hint=f"give {name} the methods state_dict() and load_state_dict(), or leave it out",
                )
        self._traits = Traits(self._modules, self._optimizers)
        self._fixed = any(fixed(part) for part in map(module_of, parts.values()) if isinstance(part, torch.nn.Module))
        self.arrangement = arrangement(t for m in self._modules.values() for t in plain_entries(m).values())
        if self._stages and self.sharded:
            raise UsageError(
                f"init({next(iter(self._stages))}=…) was given a stage of a pipeline whose weights are sharded",
                hint="leave fully_shard and parallelize_module out: only one of both can be saved",
            )

    @property
    def stages(self) -> Places:
        """The modules that are stages of a pipeline; every optimizer is then the rank's own, as they are."""
        return self._stages

    @property
    def sharded(self) -> bool:
        """Whether ranks hold tensors together."""
        return self.arrangement != REPLICATED

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Those whose weights and buffers are shared, by their names, without DDP around them."""
        return self._modules

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those whose steps change what is shared."""
        return tuple(self._optimizers.values())

    def require_stages_known(self) -> None:
        """Raise UsageError for a pipeline's stage that was given as any module. Asked once all stages are made."""
        require_known(self._modules, self._stages)

    def own_generator(self, dataset: Any, *, in_workers: bool) -> str | None:
        """Return in words which generator of the data set's own or a module's no checkpoint has.

        Workers have copies of the data set, with generators that nobody else sees.
        """
        known = {id(one.generator) for one in self._others.values() if isinstance(one, Generator)}
        place = own_generator(dataset, () if in_workers else known)
        if place is not None:
            return f"the data set has a generator of its own, {place}: let it draw from torch's, random's or numpy's"
        for name, module in self._modules.items():
            for of, part in module.named_modules():
                for key, value in vars(part).items():
                    if is_generator(value) and own_generator(value, known) is not None:
                        return f"{name}.{of}.{key} is in no checkpoint: give it to the run, resume.init(name=generator)"
        return None

    @property
    def others(self) -> tuple[Any, ...]:
        """What is neither module nor optimizer."""
        return tuple(self._others.values())

    def told(self) -> str:
        """Return as text what is no tensor in optimizers' settings and in what is neither module nor optimizer."""
        groups = [
            {k: v for k, v in group.items() if k != "params"} for one in self.optimizers for group in one.param_groups
        ]
        return f"{groups} {encode([one.state_dict() for one in self.others], '', {})}"

    def collect(
        self, rank: int, world: int, extra: dict[str, Any], shares: Shares | None = None, *, alone: bool = False
    ) -> Collected:
        """Return what this rank writes of a checkpoint, not copied; `extra` joins the rank's own part.

        `shares` says which parts of sharded tensors are this rank's, without a word to the others if `alone`.
        """
        entries = {n: plain_entries(m) for n, m in self._modules.items()}
        homes = self.homes()
        trees, shared = self._trees(entries, homes, {})
        own: Tensors = {}
        part = {**self._own_part(homes, entries), **extra}
        tree = _split(encode(part, OWN[:-1], own), own, shared)
        metadata = {"own": json.dumps(tree)}
        if rank == 0:
            metadata["shared"] = json.dumps(trees)
        if shares is None:
            _check_whole(shared)
            mine = share(shared, rank, world)
        else:
            mine, metadata["shards"] = shares.mine(shared, alone=alone)
        return Collected(
            shared=mine, own=own, metadata=metadata, names=tuple(f"{n} {tuple(t.shape)}" for n, t in shared.items())
        )

    def present(self) -> Present:
        """Return the state as it is now, not copied."""
        entries = {n: plain_entries(m) for n, m in self._modules.items()}
        homes = self.homes()
        trees, shared = self._trees(entries, homes, {})
        own: Tensors = {}
        part = self._own_part(homes, entries)
        tree: dict[str, Any] = _split(encode(part, OWN[:-1], own), own, shared)
        return Present(shared_tree=trees, shared=shared, own_tree=tree, own=own)

    def collect_changing(self, homes: Homes) -> tuple[dict[str, Any], Tensors]:
        """Return what the next forward pass may change, where nothing is sharded: as JSON, its tensors apart.

        `homes` say where the buffers are; to look through all modules for them takes longer than all else.
        """
        own: Tensors = {}
        part = self._own_part(homes, {name: plain_entries(self._modules[name]) for name in self._stages})
        tree: dict[str, Any] = encode(part, OWN[:-1], own)
        return tree, own

    def collect_rest(
        self, rank: int, world: int, changing: dict[str, Any], extra: dict[str, Any], groups: Groups
    ) -> Collected:
        """Return all but the tensors that `collect_changing` returned beside `changing`; optimizers' settings are
        those of `groups`.
        """
        own: Tensors = {}
        tree = {**changing, **encode(extra, OWN[:-1], own)}
        trees, shared = self._trees({n: plain_entries(m) for n, m in self._modules.items()}, self.homes(), groups)
        metadata = {"own": json.dumps(tree)}
        if rank == 0:
            metadata["shared"] = json.dumps(trees)
        return Collected(shared=share(shared, rank, world), own=own, metadata=metadata)

    def homes(self) -> Homes:
        """Return where the buffers are."""
        return {
            name: [(of, part) for of, part in module.named_modules() if part._buffers]  # noqa: SLF001  quick to ask
            for name, module in self._modules.items()
        }

    def groups(self) -> Groups:
        """Return the optimizers' settings of now; a script may change them before the optimizer's next step."""
        return {
            name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }

    def kept(self) -> list[int]:
        """Return what tells whether optimizers still keep the same tensors: cheap to make and to compare."""
        found: list[int] = []
        for optimizer in self._optimizers.values():
            found += map(id, _parameters(optimizer))
            found += map(id, chain.from_iterable(kept.values() for kept in optimizer.state.values()))
        return found

    def layouts(self) -> dict[str, Layout]:
        """Return how this rank holds the tensors of modules and others that ranks hold together, by their names."""
        live: Tensors = {}
        for name, module in self._modules.items():
            encode(plain_entries(module), name, live)
        own: Tensors = {}
        _split(encode({"others": self._states_of_others()}, OWN[:-1], own), own, live)
        return {name: layout_of(tensor) for name, tensor in live.items() if is_sharded(tensor)}

    def layouts_kept(self, optimizers: Mapping[str, Any]) -> dict[str, Layout]:
        """Return the same of what optimizers keep, which may not be there yet.

        `optimizers` are a checkpoint's, with names in place of tensors. What has the shape of a parameter is held as
        that is.
        """
        found: dict[str, Layout] = {}
        for name, optimizer in self._optimizers.items():
            kept = optimizers.get(name, {}).get("state", {})  # what is missing is told where it is loaded
            for of, parameter in zip(self._names(optimizer) or (), _parameters(optimizer), strict=False):
                if is_sharded(parameter) and parameter.dim():
                    found |= dict.fromkeys(leaves(kept.get(of)), layout_of(parameter))
        return found

    def apply(self, content: Content) -> None:
        """Put the state back into the script's objects. Raises UsageError when it does not fit them."""
        staged = content.own.get(STAGES, {})
        modules = {**content.shared("modules"), **staged.get("modules", {})}
        for name, module in self._modules.items():
            load(module, modules.pop(name), content.own["buffers"][name])
        del modules
        optimizers = {**content.shared("optimizers"), **staged.get("optimizers", {})}
        for name, optimizer in self._optimizers.items():
            saved = in_order(optimizers.pop(name), self._names(optimizer))
            optimizer.load_state_dict(saved)
            _keep_types(optimizer, saved)
            optimizer.zero_grad(set_to_none=True)
        self.apply_others(content)

    def apply_others(self, content: Content) -> None:
        """Put back what is neither module nor optimizer: schedulers, scalers and the like."""
        for name, part in self._others.items():
            part.load_state_dict(content.own["others"][name])

    def changed(self) -> dict[str, bool | float]:
        """Return what the script has set on its modules since the run began, and no state_dict has."""
        return self._traits.changed()

    def change(self, settings: Mapping[str, Any]) -> str:
        """Set what `changed` returned; return in words what cannot be set any more, empty where all can."""
        late = [key for key in self._traits.others(settings) if is_frozen(key)] if self._fixed else []
        self._traits.put_back({key: value for key, value in settings.items() if key not in late})
        return f"{late[0]} became {settings[late[0]]} as it trained, and DDP is made before that" if late else ""

    def fit(self, content: Content, step: int) -> None:
        """Apply; a checkpoint of another model becomes a UsageError that says so."""
        try:
            self.apply(content)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            later = isinstance(error, GroupsLater)
            raise UsageError(
                f"the checkpoint of step {step} does not fit this script: {error}",
                hint=_ALL_GROUPS if later else "undo the change of model, optimizer or scheduler, or start a new run",
            ) from error

    def _trees(
        self, entries: Mapping[str, dict[str, Any]], homes: Homes, groups: Groups
    ) -> tuple[dict[str, Any], Tensors]:
        shared: Tensors = {}
        entries = {n: e for n, e in entries.items() if n not in self._stages}
        optimizers = () if self._stages else self._optimizers
        trees = {
            "modules": {n: encode(w, n, shared) for n, w in weights_of(homes, entries).items()},
            "optimizers": {n: encode(self._by_name(n, groups), n, shared) for n in optimizers},
            "names": {n: list(e) for n, e in entries.items()},  # buffers among them, in its order
            TIED: {n: tied(e) for n, e in entries.items()},
        }
        return trees, shared

    def _own_part(self, homes: Homes, entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return what is the rank's own: buffers, others, and where it has stages of a pipeline, these.

        `entries` has those of the stages, at least.
        """
        part = {"buffers": own_buffers(homes, entries), "others": self._states_of_others()}
        if not self._stages:
            return part
        staged = {name: entries[name] for name in self._stages}
        optimizers = {name: self._by_name(name, {}) for name in self._optimizers}
        places = {name: list(place) for name, place in self._stages.items()}
        return {**part, STAGES: {"places": places, "modules": weights_of(homes, staged), "optimizers": optimizers}}

    def _states_of_others(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._others.items()}

    def _by_name(self, name: str, groups: Groups) -> dict[str, Any]:
        optimizer = self._optimizers[name]
        state = optimizer.state_dict()
        for group, then in zip(state["param_groups"], groups.get(name, ()), strict=False):
            group.update(then)
        return by_name(state, self._names(optimizer))

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        return parameter_names(self._modules, optimizer)


def _checked(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return the module without DDP around it."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UsageError(
            f"init({name}=…) was given a model in FullyShardedDataParallel",
            hint="call torch.distributed.fsdp.fully_shard(model) instead: what it shards can be saved",
        )
    ddp = replicated(module)
    return ddp.module if ddp is not None else module


def _bare(optimizer: torch.optim.Optimizer, name: str) -> torch.optim.Optimizer:
    """Return the optimizer without Accelerate's around it."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_post_hooks"):
        return _bare(inner, name)
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UsageError(
            f"init({name}=…) was given a ZeroRedundancyOptimizer, whose state no rank has whole",
            hint="call torch.distributed.fsdp.fully_shard(model) and give its parameters to the optimizer itself",
        )
    return optimizer


def _keep_types(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give back the types that `load_state_dict` changed to that of the weight, as of fp32 state for bf16 weights."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, _parameters(optimizer), strict=True):
        kept = optimizer.state.get(parameter)
        if kept is not None:
            optimizer.state[parameter] = _typed(kept, saved["state"].get(key))


def _typed(now: Any, saved: Any) -> Any:
    """Return what is kept now, each tensor with the type that it was saved with."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        return now if now.dtype == saved.dtype else saved.to(now.device)
    if isinstance(now, dict) and isinstance(saved, dict):
        now.update({key: _typed(value, saved.get(key)) for key, value in now.items()})
    elif isinstance(now, (list, tuple)) and isinstance(saved, (list, tuple)) and len(now) == len(saved):
        return type(now)(_typed(*pair) for pair in zip(now, saved, strict=True))
    return now


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_whole(tensors: Tensors) -> None:
    sharded = next((name for name, tensor in tensors.items() if is_sharded(tensor)), None)
    if sharded is not None:
        raise UsageError(
            f"{sharded} is sharded, and no weight was when the run began",
            hint="call resume.init after fully_shard or parallelize_module, and give it the model",
        )


def _split(tree: Any, own: Tensors, shared: Tensors) -> Any:
    """Move what ranks hold together from `own` to `shared`, under names that are no rank's own; return the tree so."""
    moved = {name: name.removeprefix(OWN) for name, tensor in own.items() if is_sharded(tensor)}
    if not moved:
        return tree
    shared.update({name: own.pop(old) for old, name in moved.items()})
    return renamed(tree, moved)
