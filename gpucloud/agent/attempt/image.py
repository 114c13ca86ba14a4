"""The job's container image on this node: pulled once, and from then on named by its content."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.job.spec import ContainerRuntime
from gpucloud.domain.node.container import ImageFact, ImageWanted
from gpucloud.locks import locked
from gpucloud.wholefile import read_text, write_whole

_HUB = "https://index.docker.io/v1/"  # Docker's own name for its registry in config.json


def fact(root: Path, reference: str) -> ImageFact | None:
    """Return how the image was pulled here; None when it was not, or is gone since."""
    text = read_text(_record(root, reference))
    try:
        found = from_json(ImageFact, text) if text is not None else None
    except Malformed:
        return None
    return found if found is not None and _is_there(found) else None


def pull(root: Path, wanted: ImageWanted) -> str | None:
    """Have the image; return None, or the runtime's own words when it cannot be had. May be repeated and killed."""
    record = _record(root, wanted.reference)
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    runtime = chosen_runtime(wanted.runtime)
    with locked(record.with_suffix(".lock")):
        if fact(root, wanted.reference) is not None:
            return None
        try:
            pinned = _docker(wanted) if runtime is ContainerRuntime.DOCKER else _apptainer(record, wanted)
        except _Refused as refused:
            return str(refused)
        write_whole(record, to_json(ImageFact(reference=wanted.reference, runtime=runtime, pinned=pinned)))
        return None


class _Refused(Exception):
    pass


def _docker(wanted: ImageWanted) -> str:
    """Pull by Docker; what was built or loaded on the node is taken as it is. The login lives as long as the pull."""
    if _said(["docker", "image", "inspect", "--format", "{{.Id}}", wanted.reference], {}) is None:
        with tempfile.TemporaryDirectory() as config:
            env = {}
            if wanted.login is not None:
                path = Path(config, "config.json")
                entry = {"auth": base64.b64encode(wanted.login.encode()).decode()}
                write_whole(path, json.dumps({"auths": {registry_of(wanted.reference): entry}}))
                env = {"DOCKER_CONFIG": config}
            _run(["docker", "pull", "--quiet", wanted.reference], env)
    template = "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}"
    return _run(["docker", "image", "inspect", "--format", template, wanted.reference], {})


def _apptainer(record: Path, wanted: ImageWanted) -> str:
    """Make one file of the image, named by the reference's hash; a reference with a path is a file already."""
    if wanted.reference.startswith("/"):
        return wanted.reference
    target, beside = record.with_suffix(".sif"), record.with_suffix(".new.sif")
    env = {}
    if wanted.login is not None:
        user, _, password = wanted.login.partition(":")
        env = {"APPTAINER_DOCKER_USERNAME": user, "APPTAINER_DOCKER_PASSWORD": password}
    source = wanted.reference if "://" in wanted.reference else f"docker://{wanted.reference}"
    _run(["apptainer", "pull", "--force", str(beside), source], env)
    beside.replace(target)
    return str(target)


def registry_of(reference: str) -> str:
    """Return the registry's name in Docker's config.json (distribution/reference: a first part with `.` or `:`)."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else _HUB


def _is_there(found: ImageFact) -> bool:
    if found.runtime is ContainerRuntime.APPTAINER:
        return Path(found.pinned).exists()
    return _said(["docker", "image", "inspect", "--format", "{{.Id}}", found.pinned], {}) is not None


def _run(argv: list[str], env: dict[str, str]) -> str:
    """Return the last line of the command's output. Raises _Refused with its complaint."""
    try:
        done = subprocess.run(
            argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise _Refused(f"{argv[0]}: {error.strerror}; the image needs Docker or Apptainer on the node") from error
    if done.returncode != 0:
        raise _Refused(done.stderr.strip() or f"{argv[0]} ended with exit code {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def _said(argv: list[str], env: dict[str, str]) -> str | None:
    try:
        return _run(argv, env)
    except _Refused:
        return None


def _record(root: Path, reference: str) -> Path:
    return root / "images" / f"{hashlib.sha256(reference.encode()).hexdigest()[:16]}.json"


# Which container runtime this node uses.


def chosen_runtime(wanted: ContainerRuntime) -> ContainerRuntime:
    """Return the runtime; AUTO is Apptainer where only that is, else Docker."""
    if wanted is not ContainerRuntime.AUTO:
        return wanted
    alone = shutil.which("docker") is None and shutil.which("apptainer") is not None
    return ContainerRuntime.APPTAINER if alone else ContainerRuntime.DOCKER
