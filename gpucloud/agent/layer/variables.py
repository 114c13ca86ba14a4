"""The environment variables that a setup and our own installs see."""

from __future__ import annotations

import os
import platform

from gpucloud.agent.layer.environment import Environment
from gpucloud.agent.layer.places import Places
from gpucloud.domain.layer import LayerOrder
from gpucloud.domain.torchwheels import USUAL_INDEX, torch_url


def variables(order: LayerOrder, places: Places, made: Environment | None, index: str) -> dict[str, str]:
    """Return the node's variables, ours, and the job's, which win; `made` is None before there is an environment.

    Addresses of indexes travel here only, never in an argument list: they may hold a password.
    """
    job = dict(order.env)
    packages = job.get("PIP_INDEX_URL") or order.pip_mirror
    mirrors = dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"), packages) if packages else {}
    ours = {
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CACHE_DIR": str(places.cache / "pip"),
        "UV_CACHE_DIR": str(places.cache / "uv"),
        "UV_NO_PROGRESS": "1",
        "MAMBA_ROOT_PREFIX": str(places.cache / "mamba"),
        "GPUCLOUD_TORCH_INDEX": f"{(order.torch_mirror or USUAL_INDEX).rstrip('/')}/{index}",
    }
    env = {**os.environ, **ours, **mirrors, **job}
    if made is not None:
        env["PATH"] = f"{made.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        env["CONDA_PREFIX" if made.conda else "VIRTUAL_ENV"] = str(made.folder)
        env["UV_PYTHON"] = str(made.python)
    return env


def installing(env: dict[str, str], index: str, mirror: str | None) -> dict[str, str]:
    """Return the variables under which pip finds torch's build of that index, and no other."""
    url = torch_url(index, mirror, platform.machine())
    if url is None:
        return env
    others = ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_INDEX_URL")
    kept = {name: value for name, value in env.items() if name not in others}
    return {**kept, "PIP_INDEX_URL": url, "UV_DEFAULT_INDEX": url}
