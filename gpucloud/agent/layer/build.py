"""Making a layer: the environment, what the job lacks, the user's setup; once for the same wishes, killed or not."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpucloud import smi
from gpucloud.agent.layer import tools
from gpucloud.agent.layer.collect import collect
from gpucloud.agent.layer.environment import (
    Environment,
    add_pip,
    add_pip_commands,
    conda_argv,
    make_venv,
)
from gpucloud.agent.layer.fact import base, index_for, key_of, read_ready
from gpucloud.agent.layer.installed import freeze, installed_version, torch_cuda
from gpucloud.agent.layer.places import Places, places
from gpucloud.agent.layer.simpleindex import Unreachable
from gpucloud.agent.layer.steps import stepped
from gpucloud.agent.layer.variables import installing, variables
from gpucloud.domain.bootstrap.answers import SETUP_LOG_BYTES, FailedSetup
from gpucloud.domain.layer import BOTO3, ISAL, LayerOrder, suffices
from gpucloud.domain.torchwheels import TORCH
from gpucloud.wholefile import read_tail, write_whole

_INSTALLS = re.compile(r"\b(pip3?|uv)\b")
_WAIT_WORTH_TELLING_S = 1.0


class Failed(Exception):
    """The layer could not be made; the message is for the user."""


class SetupFailed(Failed):
    """What the job file has run failed, the job's `setup` or `conda`."""

    def __init__(self, failed: FailedSetup) -> None:
        super().__init__(failed.shown())
        self.failed = failed


def build(order: LayerOrder) -> tuple[str, ...]:
    """Make the layer unless it is ready; return what the user should know of it. Raises Failed, SetupFailed.

    Built where it will stay, because scripts that pip installs name their interpreter; `ready.json` comes last,
    and what is there without it is the rest of a build that was killed.
    """
    where = places()
    index = index_for(smi.gpus()[0])
    key = key_of(order.wanted.digest, index)
    folder = where.folder(key)
    where.layers.mkdir(parents=True, exist_ok=True)
    with _alone(where, key) as waited_s:
        notes: tuple[str, ...] = ()
        if waited_s:
            notes = (f"waited {waited_s:.0f} s for another setup of the same kind here",)
        if read_ready(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            work = _Work(order=order, places=where, folder=folder, index=index)
            work.make()
            collect(where, keep=key)
    return notes


@contextmanager
def _alone(where: Places, key: str) -> Iterator[float]:
    """Hold the layer's lock and give the seconds that it was waited for, 0 for hardly any.

    Another node with the same home for layers, or an earlier call that we lost, may be at it.
    """
    with (where.layers / f"{key}.lock").open("w") as lock:
        began = time.monotonic()
        fcntl.flock(lock, fcntl.LOCK_EX)
        waited_s = time.monotonic() - began
        yield waited_s if waited_s >= _WAIT_WORTH_TELLING_S else 0.0


@dataclass(slots=True, kw_only=True)
class _Work:
    """One layer under way."""

    order: LayerOrder
    places: Places
    folder: Path
    index: str
    uv: str | None = None

    def make(self) -> None:
        """Make the layer from nothing. Raises Failed, SetupFailed."""
        self._log_path.unlink(missing_ok=True)
        made = self._environment()
        lacks_torch = self.order.wanted.torch and installed_version("torch", made.path) is None
        lacks_boto3 = self.order.wanted.boto3 and not suffices(installed_version("boto3", made.path))
        self._provide_pip(made, needed=lacks_torch or lacks_boto3)
        if lacks_torch:  # before the setup: what depends on torch is then content with this build
            self._run(made, f"pip install -q '{TORCH}'", installing_torch=True)
        if self.order.setup:
            self._run_setup(made)
        if self.order.wanted.boto3 and not suffices(installed_version("boto3", made.path)):
            self._run(made, f"pip install -q '{BOTO3}' && {{ pip install -q --only-binary :all: '{ISAL}' || true; }}")
        self._finish(made)

    def _environment(self) -> Environment:
        if not self.order.conda:
            return make_venv(self.folder)
        file = Path(self.order.code, self.order.conda)
        try:
            program = tools.conda_program(self.places, os.environ.get("PATH", os.defpath))
        except Unreachable as error:
            raise Failed(
                f"conda: the node has no micromamba, mamba or conda, and none could be had: {error}"
            ) from error
        code = self._call(conda_argv(program, self.folder, file), self.order.code, self._variables(None))
        self._judge_users(code, f"conda: {self.order.conda}")
        made = Environment(folder=self.folder, conda=True)
        if not made.python.exists():
            raise Failed(f"{self.order.conda} makes an environment without Python; add `python` to its dependencies")
        return made

    def _provide_pip(self, made: Environment, *, needed: bool) -> None:
        """Give the environment its `pip`. Where nothing asks for one, nothing is fetched for it."""
        variables = self._variables(made)
        asked = needed or _INSTALLS.search(self.order.setup) is not None
        has_pip = installed_version("pip", made.path) is not None
        if self._may_use_uv(made):
            self.uv = tools.find_uv(self.places, variables["PATH"])
            if self.uv is None and asked:
                self.uv = self._fetched_uv(variables)
        if not has_pip and (asked or self.order.setup):
            self._unpack_pip(made, variables, must=needed or (asked and self.uv is None))
        add_pip_commands(made, self.uv)

    def _may_use_uv(self, made: Environment) -> bool:
        """Uv does not look below the layer, and would fetch again what the base has: torch is gigabytes."""
        return made.conda or base().torch is None

    def _fetched_uv(self, variables: dict[str, str]) -> str | None:
        try:
            return tools.fetch_uv(self.places, variables)
        except Unreachable as error:
            self._log(f"without uv: {error}\n")
            return None

    def _unpack_pip(self, made: Environment, variables: dict[str, str], *, must: bool) -> None:
        try:
            add_pip(made, tools.fetch_pip(self.places, variables))
        except Unreachable as error:
            if must and self.uv is None:
                raise Failed(f"the node's Python has no pip, and none could be had: {error}") from error
            self._log(f"without pip: {error}\n")

    def _run(self, made: Environment, commands: str, *, installing_torch: bool = False) -> None:
        """Run commands of our own in the layer."""
        env = self._variables(made)
        if installing_torch:
            env = installing(env, self.index, self.order.torch_mirror)
        code = self._call(["/bin/sh", "-e", "-c", commands], str(self.folder), env)
        if code != 0:
            tail = "\n".join(read_tail(self._log_path, 8192).splitlines()[-20:])
            raise Failed(f"{tail}\n(exit code {code}; all of it: {self._log_path})")

    def _run_setup(self, made: Environment) -> None:
        """Run the user's commands in the layer, stopped at the first that fails."""
        setup = stepped(self.order.setup, self._log_path.with_suffix(".at"))
        setup.file.unlink(missing_ok=True)
        code = self._call(["/bin/sh", "-e", "-c", setup.text], self.order.code, self._variables(made))
        self._judge_users(code, setup.last_begun())
        setup.file.unlink(missing_ok=True)

    def _judge_users(self, code: int, command: str) -> None:
        """Raise SetupFailed for what the job file had run; what was killed by a signal was not done by the file."""
        if code < 0:
            raise Failed(f"{command}: ended by signal {-code} (all of it: {self._log_path})")
        if code != 0:
            log = read_tail(self._log_path, SETUP_LOG_BYTES)
            raise SetupFailed(FailedSetup(command=command, exit_code=code, log=log))

    def _call(self, argv: list[str], directory: str, env: dict[str, str]) -> int:
        with self._log_path.open("ab") as log:
            return subprocess.run(
                argv,
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode

    def _finish(self, made: Environment) -> None:
        uv = tools.uv_version(self.uv) if self.uv else None
        said = {
            "setup": self.order.setup,
            "torch": installed_version("torch", made.path),
            "torch_cuda": torch_cuda(made.path),
            "boto3": installed_version("boto3", made.path),
            "torch_index": self.index,
            "uv": ".".join(str(part) for part in uv) if uv else None,
            "packages": freeze([str(made.site_packages)]),
        }
        write_whole(self.folder / "ready.json", json.dumps(said))

    def _variables(self, made: Environment | None) -> dict[str, str]:
        return variables(self.order, self.places, made, self.index)

    def _log(self, text: str) -> None:
        with self._log_path.open("a") as log:
            log.write(text)

    @property
    def _log_path(self) -> Path:
        return self.places.layers / f"{self.folder.name}.log"
