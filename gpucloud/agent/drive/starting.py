"""Starts a node's driver in a Python that has what it needs, detached from whoever asks.

drive/               the driver's folder, and besides:
drive/wanted.json    where its order is (`ControllerWanted`)
drive/key            the cluster's private SSH key, mode 0600
drive/code/<tree>/   the job's code as it was started, not as its processes left it
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from gpucloud.agent.layer.build import Failed, build
from gpucloud.agent.layer.environment import gpu_kind, key_of, places, read_ready
from gpucloud.agent.single_process import controller_process
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import NodeError
from gpucloud.domain.node.bootstrap.wanted import ControllerWanted
from gpucloud.domain.node.layer import LayerOrder, LayerWanted
from gpucloud.system import smi
from gpucloud.system.wholefile import write_whole


def start(root: Path, wanted: ControllerWanted, *, package: Path | None, sha256: str) -> str:
    """Start the driver and return "started" once it has read its order, or "already" when this very one runs.

    One of another package is ended first: whatever it was about, the next one goes on with. Where no Python here can
    drive yet, the driver has one made first: training does not wait for that. Raises NodeError.
    """
    python = able() or sys.executable
    process = controller_process(root)
    process.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(process.folder / "wanted.json", to_json(wanted))
    lock = process.take(sha256, replace=True)
    if lock is None:
        return "already"
    try:
        return _detach(root, (python, "-I", str(package)), lock)
    finally:
        os.close(lock)


def _detach(root: Path, run: tuple[str, ...], lock: int) -> str:
    """The driver inherits the lock; our copy is closed, so that it ends with it."""
    process = controller_process(root)
    reader, writer = os.pipe()
    with process.log.open("ab") as log:
        subprocess.Popen(
            (*run, "drive", "--root", str(root), "--as", str(lock), str(writer)),
            cwd=process.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock, writer),
            start_new_session=True,
        )
    os.close(writer)
    failure = process.failure(reader)
    if failure is not None:
        raise NodeError(failure, hint="run the command again")
    return "started"


# Which Python drives: it needs boto3 and paramiko, as a supervisor outside does.


_NEEDS = ("boto3", "paramiko")
_LOCK = "requirements.lock"
_LIMIT_S = 60.0
_ASK = """\
import importlib.util, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name)]
sys.exit("it lacks " + " and ".join(missing) if missing else 0)
"""


def able() -> str | None:
    """Return an interpreter in which they import: this one, or the one made for it; None while there is none."""
    if _imports(sys.executable):
        return sys.executable
    own = str(_layer_python())
    return own if _imports(own) else None


def make(pip_mirror: str | None) -> str:
    """Return such an interpreter, made on this node if need be: once, whoever asks. NodeError when it cannot be had.

    It is a layer like a job's, of the agent's own kind: by uv, from the job's mirror, and by the hashes of the
    lock that gpucloud brings along.
    """
    found = able()
    if found is not None:
        return found
    wanted = LayerWanted(digest=_digest(), always=True, boto3=False, torch=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            lock = Path(folder, _LOCK)
            lock.write_bytes(_lock())
            setup = f"uv pip install -q --no-deps --require-hashes -r {shlex.quote(str(lock))}"
            build(LayerOrder(wanted=wanted, setup=setup, code=folder, pip_mirror=pip_mirror))
    except Failed as error:
        raise NodeError(
            f"no Python that can drive the job could be made: {error}",
            hint="let machines reach a package index: mirrors: {pip: https://…/simple}",
        ) from error
    return str(_layer_python())


def _layer_python() -> Path:
    folder = places().folder(key_of(_digest(), gpu_kind(smi.gpus()[0])))
    ready = read_ready(folder)
    return Path(ready.python) if ready is not None else folder / "bin" / "python"


def _digest() -> str:
    return hashlib.sha256(b"driver " + _lock()).hexdigest()


def _lock() -> bytes:
    return files(__package__).joinpath(_LOCK).read_bytes()


def _imports(python: str) -> bool:
    argv = (python, "-I", "-c", _ASK, *_NEEDS)
    try:
        return subprocess.run(argv, capture_output=True, check=False, timeout=_LIMIT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
