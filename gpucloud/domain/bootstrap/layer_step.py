"""The step that makes the job's own Python environment."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.layer import BOTO3, LayerOrder
from gpucloud.domain.torchwheels import TORCH

_TIMEOUT_S = 3600.0


def layer_hint(wanted: Wanted) -> str:
    """Return what to do about a layer that could not be made."""
    if wanted.setup is not None:
        return "mend `setup:` in the job file"
    if wanted.conda is not None:
        return f"mend {wanted.conda}, or install micromamba on the node's image"
    if wanted.torch:
        return f"let the nodes reach PyPI and PyTorch's index, name `mirrors:`, or take an image with {TORCH}"
    return f"let the nodes reach PyPI, or take an image whose Python has {BOTO3}: the store in S3 needs it"


def _needed(facts: Facts, wanted: Wanted) -> str | None:
    if facts.layer is None or facts.layer.ready:
        return None
    if wanted.setup is not None or wanted.conda is not None:
        return "setup has not run here"
    return "the script needs torch" if wanted.torch and facts.torch is None else "the store needs boto3"


def _commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    if wanted.layer is None:
        return ()
    order = LayerOrder(
        wanted=wanted.layer,
        setup=wanted.setup or "",
        code=wanted.code,
        conda=wanted.conda or "",
        env=wanted.env,
        pip_mirror=wanted.pip_mirror,
        torch_mirror=wanted.torch_mirror,
    )
    return (
        Command(
            argv=(facts.python, package_path(facts.root, wanted.package), "layer"),
            stdin=to_json(order).encode(),
            timeout_s=_TIMEOUT_S,
        ),
    )


LAYER = Step(name="setup", needed=_needed, commands=_commands)
