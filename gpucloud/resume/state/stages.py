"""Stages of a pipeline (`torch.distributed.pipelining`): modules of which each rank has others, under any names."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.resume.state import randomness
from gpucloud.resume.state.modules import replicated

_PIPELINING = "torch.distributed.pipelining.stage"
Places = Mapping[str, tuple[int, int]]
"""Of each module that is a stage, by its name, the number of the stage and of how many it is one."""


def is_stage(part: Any) -> bool:
    """Whether this is a PipelineStage, which has no state but its module's."""
    stage = _stage_class()
    return stage is not None and isinstance(part, stage)


def _stage_class() -> Any:
    """Return what all stages are of, None where the script has none. UsageError where this torch has it no longer.

    To go on without would give a rank any other's weights.
    """
    module = sys.modules.get(_PIPELINING)
    if module is None:
        return None
    found = getattr(module, "_PipelineStageBase", None)
    if found is None:
        raise UsageError(
            f"stages of a pipeline cannot be told from other modules in torch {torch.__version__}",
            hint="a newer gpucloud, or an older torch",
        )
    return found


def module_of(part: Any) -> Any:
    """Return the module of a PipelineStage, and anything else as it is."""
    return part.submod if is_stage(part) else part


def stage_of(part: Any) -> Any:
    """Return the PipelineStage that this is, or was made of, which a module does not know itself; None for none.

    It must be known: of equal stages names and shapes are the same, and each rank would be given any other's.
    """
    if is_stage(part) or not isinstance(part, torch.nn.Module):
        return part if is_stage(part) else None
    return next((one for one in _made() if _bare(one.submod) is _bare(part)), None)


def _made() -> Iterator[Any]:
    """Yield the stages that the script has made so far."""
    stage = _stage_class()
    if stage is not None:
        # By type, not `isinstance`: that asks objects which answer for others, as proxies do.
        yield from (one for one in gc.get_objects() if issubclass(type(one), stage))


def require_known(modules: Mapping[str, torch.nn.Module], stages: Places) -> None:
    """Raise UsageError where one of the modules, or a part of it, is a stage's, and it is not known to be that stage.

    Saved as what all ranks have alike, each would be given any other's weights. Asked once all stages are made.
    """
    shared = {
        id(weight): name for name, module in modules.items() if name not in stages for weight in module.parameters()
    }
    for one in _made():
        name = next((shared[id(weight)] for weight in one.submod.parameters() if id(weight) in shared), None)
        if name is not None:
            raise UsageError(
                f"{name!r} is of a pipeline's stage {one.stage_index}, and the run does not know it as one",
                hint="make the PipelineStage before resume.init, and give it that: resume.init(model=stage, …)",
            )


def place_of(stage: Any) -> tuple[int, int]:
    """Return the number of the stage and how many there are."""
    return int(stage.stage_index), int(stage.num_stages)


def share_of(stages: Places, over: Any, ranks: tuple[int, int]) -> tuple[int, int]:
    """Return which share of the batches this rank trains on, and of how many; `ranks` are its number, and how many.

    Ranks of one pipeline train on the same. UsageError where nothing tells which ranks are of one.
    """
    if over is not None:
        return over.get_local_rank(), over.size()
    if not stages:
        return ranks
    if ranks[1] * len(stages) == next(iter(stages.values()))[1]:
        return 0, 1
    raise UsageError(
        "several pipelines train side by side, and nothing tells which ranks are of the same one",
        hint='name the dimension of the mesh over which batches are split: run.loader(…, over=mesh["data"])',
    )


def keep_trials_apart(stage: Any) -> None:
    """Have the stage leave generators and buffers as they are where torch tries it out, ahead of its first step.

    It runs the module once to learn the shapes of what ranks send each other, in each attempt (dynamic inference; torch
    2.6 to 2.13): draws of that and averages over it would be in a resumed run alone.
    """
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):  # the second one since torch 2.12
        if (prepare := getattr(stage, name, None)) is not None:
            setattr(stage, name, _without_trace(prepare, stage.submod))


def _without_trace(prepare: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def tried(*args: Any, **kwargs: Any) -> Any:
        before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        drawn = randomness.here()
        found = prepare(*args, **kwargs)
        drawn.put_back()
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        return found

    return tried


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    ddp = replicated(module)
    return ddp.module if ddp is not None else module


def require_same(kept: Mapping[str, Any] | None, now: Places, step: int, *, worlds: tuple[int, int]) -> None:
    """Raise UsageError where what a checkpoint of that step kept for this rank is of other stages.

    `worlds` are how many ranks there were, and are. Only for the same stages on as many ranks each rank finds its own.
    """
    before = {name: (int(place[0]), int(place[1])) for name, place in (kept or {}).get("places", {}).items()}
    if before == dict(now) and (not now or worlds[0] == worlds[1]):
        return
    raise UsageError(
        f"the checkpoint of step {step} has {_told(before)} on {worlds[0]} ranks, and this script has {_told(now)} on "
        f"{worlds[1]}",
        hint="resume with the stages and the number of ranks that it was saved with, or start a new run",
    )


def _told(places: Places) -> str:
    if not places:
        return "no stages of a pipeline"
    numbers = ", ".join(str(index) for index, _ in places.values())
    return f"stage {numbers} of {next(iter(places.values()))[1]} here"
