"""Stages of a pipeline (`torch.distributed.pipelining`): modules of which each rank has others, under any names."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.resume.state import randomness
from gpucloud.resume.state.traits import replicated

_PIPELINING = "torch.distributed.pipelining.stage"
Places = Mapping[str, tuple[int, int]]
"""Of each module that is a stage, by its name, the number of the stage and of how many it is one."""


def is_stage(part: Any) -> bool:
    """Whether this is a PipelineStage, which has no state but its module's."""
    stage = getattr(sys.modules.get(_PIPELINING), "_PipelineStageBase", None)
    return stage is not None and isinstance(part, stage)


def module_of(part: Any) -> Any:
    """Return the module of a PipelineStage, and anything else as it is."""
    return part.submod if is_stage(part) else part


def stage_of(part: Any) -> Any:
    """Return the PipelineStage that this is, or was made of, which a module does not know itself; None for none.

    It must be known: of equal stages names and shapes are the same, and each rank would be given any other's.
    """
    stage = getattr(sys.modules.get(_PIPELINING), "_PipelineStageBase", None)
    if stage is None or is_stage(part) or not isinstance(part, torch.nn.Module):
        return part if is_stage(part) else None
    # By type, not `isinstance`: that asks objects which answer for others, as proxies do.
    made = [one for one in gc.get_objects() if issubclass(type(one), stage)]
    return next((one for one in made if _bare(one.submod) is _bare(part)), None)


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


def drawn_alike(stages: Places, loader: Any) -> Mapping[str, Any]:
    """Return what all ranks must have alike so that those of a pipeline read the same batches of a loader of their own.

    UsageError for a sampler that draws from torch's own generator: by then each stage has drawn otherwise from it.
    """
    sampler: Any = getattr(loader, "sampler", None)
    if not stages or not hasattr(sampler, "generator"):
        return {}
    if sampler.generator is None:
        raise UsageError(
            f"{type(sampler).__name__} draws from each rank's own generator, and ranks of a pipeline read one order",
            hint="DataLoader(…, generator=torch.Generator().manual_seed(0)) on every rank, or run.loader",
        )
    return {"seed of the sampler": sampler.generator.initial_seed()}


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
