"""Making a layer: environment, what the job lacks, the user's setup; once for the same wishes; old ones collected."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpucloud.agent.layer import tools
from gpucloud.agent.layer.environment import (
    Environment,
    Places,
    add_commands,
    conda_argv,
    freeze,
    gpu_kind,
    hide_base,
    installed_version,
    is_set_up,
    key_of,
    make_venv,
    mark_set_up,
    only_from,
    places,
    read_ready,
    show_base,
    torch_cuda,
    variables,
)
from gpucloud.agent.layer.tools import Unreachable
from gpucloud.domain.node.bootstrap.facts import SETUP_LOG_BYTES, FailedSetup
from gpucloud.domain.node.layer import BOTO3, ISAL, PIP_VERSION, PIP_WHEEL, TORCH, LayerOrder, setup_uses_tree, suffices
from gpucloud.system import smi
from gpucloud.system.processes import locked, try_lock
from gpucloud.system.wholefile import read_last_lines, read_tail, write_whole

_CALLS_UV = re.compile(r"\buvx?\b")
_CALLS_PIP = re.compile(r"(?<!uv )\bpip3?\b")
_INSTALLS_BY_PIP = re.compile(rf"{_CALLS_PIP.pattern} install\b")
_SLOWER = "setup: `pip install` takes longer than `uv pip install`, which works here too"
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
    gpu = gpu_kind(smi.gpus()[0])
    key = key_of(order.wanted.digest, gpu)
    folder = where.folder(key)
    where.layers.mkdir(parents=True, exist_ok=True)
    with _alone(where, key) as waited_s:
        notes: tuple[str, ...] = ()
        if waited_s:
            notes = (f"waited {waited_s:.0f} s for another setup of the same kind here",)
        work = _Work(order=order, places=where, folder=folder, torch_backend=gpu[0])
        if read_ready(folder) is not None:
            if not is_set_up(order.wanted.tree, key):
                work.repeat()
        else:
            shutil.rmtree(folder, ignore_errors=True)
            work.make()
            notes += (_SLOWER,) if _INSTALLS_BY_PIP.search(order.setup) else ()
            collect(where, keep=key)
    return notes


@contextmanager
def _alone(where: Places, key: str) -> Iterator[float]:
    """Hold the layer's lock and give the seconds that it was waited for, 0 for hardly any.

    Another node with the same home for layers, or an earlier call that we lost, may be at it.
    """
    began = time.monotonic()
    with locked(where.layers / f"{key}.lock"):
        waited_s = time.monotonic() - began
        yield waited_s if waited_s >= _WAIT_WORTH_TELLING_S else 0.0


@dataclass(slots=True, kw_only=True)
class _Work:
    """One layer under way."""

    order: LayerOrder
    places: Places
    folder: Path
    torch_backend: str
    uv: str | None = None

    def make(self) -> None:
        """Make the layer from nothing. Raises Failed, SetupFailed."""
        self._log_path.unlink(missing_ok=True)
        made = self._environment()
        lacks_torch = self.order.wanted.torch and installed_version("torch", made.path) is None
        lacks_boto3 = self.order.wanted.boto3 and not suffices(installed_version("boto3", made.path))
        self._provide_tools(made, needed=lacks_torch or lacks_boto3)
        if lacks_torch:  # before the setup: what depends on torch is then content with this build
            self._run(made, f"{self._own_uv(made)} pip install -q '{TORCH}'", index=self.order.torch_mirror)
        self._set_up(made)

    def repeat(self) -> None:
        """Run the setup in the layer as it is, for what it leaves in the tree. Raises Failed, SetupFailed.

        Nothing is taken from the layer: scripts of other nodes may run by it.
        """
        made = Environment(folder=self.folder, conda=bool(self.order.conda))
        self._provide_tools(made, needed=False)
        self._set_up(made)

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

    def _provide_tools(self, made: Environment, *, needed: bool) -> None:
        """Give the environment uv and pip. Where nothing may ask for one, nothing is fetched for it.

        A setup that runs scripts of the job's own (`bash install.sh`, `make`) may ask for both.
        """
        env, setup = self._variables(made), self.order.setup
        may_ask = setup_uses_tree(setup)
        has_pip = installed_version("pip", made.path) is not None
        lacks_pip = not has_pip and _CALLS_PIP.search(setup) is not None
        self.uv = tools.find_uv(self.places, env["PATH"])
        if self.uv is None and (needed or lacks_pip or may_ask or _CALLS_UV.search(setup)):
            self.uv = self._fetched_uv(env, must=needed or lacks_pip)
        add_commands(made, self.uv)
        if self.uv is not None and not has_pip and (lacks_pip or may_ask):
            pip = f"pip=={PIP_VERSION} --hash=sha256:{PIP_WHEEL.sha256}"
            otherwise = "" if lacks_pip else " || true"
            self._run(made, f"echo '{pip}' | {self._own_uv(made)} pip install -q --require-hashes -r -{otherwise}")
        if self.uv is not None and not made.conda:
            show_base(made)

    def _own_uv(self, made: Environment) -> str:
        """Return uv as a word of a shell: the one that was found, whatever the environment has. Raises Failed."""
        if self.uv is None:  # the setup took away what had sufficed
            self.uv = self._fetched_uv(self._variables(made), must=True)
            add_commands(made, self.uv)
        return shlex.quote(str(self.uv))

    def _fetched_uv(self, env: dict[str, str], *, must: bool) -> str | None:
        try:
            return tools.fetch_uv(self.places, env)
        except Unreachable as error:
            if must:
                raise Failed(f"the node has no uv, and none could be had: {error}") from error
            self._log(f"without uv: {error}\n")
            return None

    def _run(self, made: Environment, commands: str, *, index: str | None = None) -> None:
        """Run commands of our own in the layer; packages come from that index alone, if there is one."""
        env = self._variables(made)
        if index is not None:
            env = only_from(index, env)
        code = self._call(["/bin/sh", "-e", "-c", commands], str(self.folder), env)
        if code != 0:
            tail = "\n".join(read_tail(self._log_path, 8192).splitlines()[-20:])
            raise Failed(f"{tail}\n(exit code {code}; all of it: {self._log_path})")

    def _set_up(self, made: Environment) -> None:
        """Run the setup, add what a store needs where it left none or an older one, and note that all is ready."""
        if self.order.setup:
            self._run_setup(made)
        if self.order.wanted.boto3 and not suffices(installed_version("boto3", made.path)):
            install = f"{self._own_uv(made)} pip install -q"
            self._run(made, f"{install} '{BOTO3}' && {{ {install} --only-binary :all: '{ISAL}' || true; }}")
        self._finish(made)

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
            log = read_last_lines(self._log_path, SETUP_LOG_BYTES)
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
        hide_base(made)
        uv = tools.uv_version(self.uv) if self.uv else None
        said = {
            "setup": self.order.setup,
            "torch": installed_version("torch", made.path),
            "torch_cuda": torch_cuda(made.path),
            "boto3": installed_version("boto3", made.path),
            "torch_backend": self.torch_backend,
            "uv": ".".join(str(part) for part in uv) if uv else None,
            "packages": freeze([str(made.site_packages)]),
        }
        mark_set_up(self.order.wanted.tree, self.folder.name)
        write_whole(self.folder / "ready.json", json.dumps(said))

    def _variables(self, made: Environment | None) -> dict[str, str]:
        return variables(self.order, self.places, made, self.torch_backend)

    def _log(self, text: str) -> None:
        with self._log_path.open("a") as log:
            log.write(text)

    @property
    def _log_path(self) -> Path:
        return self.places.layers / f"{self.folder.name}.log"


# Which command of a setup failed: `sh` tells nobody, so that a file says which one was begun last.


_MOST_LINES = 400
_PARSED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A setup that notes each command in `file` before it runs; `commands` are their texts, in order."""

    text: str
    commands: tuple[str, ...]
    file: Path

    def last_begun(self) -> str:
        """Return the command that was begun last, in one line."""
        number = _number(self.file)
        chosen = self.commands[number] if 0 <= number < len(self.commands) else self.commands[0]
        return " ".join(line.strip().removesuffix("\\").strip() for line in chosen.splitlines()).strip()


def stepped(text: str, file: Path) -> Stepped:
    """Return the setup as it is run.

    A text that the shell would not read in pieces as it does in one (with here-documents, or unfinished) stays as it is
    and is one command.
    """
    commands = _commands(text)
    if len(commands) < 2:
        return Stepped(text=text, commands=(text.strip(),), file=file)
    place = shlex.quote(str(file))
    noted = (f"echo {number} 2>/dev/null >|{place} || :\n{command}" for number, command in enumerate(commands))
    return Stepped(text="\n".join(noted), commands=commands, file=file)


def _commands(text: str) -> tuple[str, ...]:
    lines = text.split("\n")
    if "<<" in text or len(lines) > _MOST_LINES:
        return ()
    commands: list[str] = []
    begun: list[str] = []
    for line in lines:
        begun.append(line)
        if line.endswith("\\") or not _parses("\n".join(begun)):
            continue
        if any(part.strip() and not part.lstrip().startswith("#") for part in begun):
            commands.append("\n".join(begun))
        begun = []
    return () if begun else tuple(commands)


def _parses(text: str) -> bool:
    try:
        done = subprocess.run(
            ["/bin/sh", "-n", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PARSED_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _number(file: Path) -> int:
    try:
        return int(file.read_text().strip() or 0)
    except (OSError, ValueError):
        return 0


# Removing layers that nobody uses any more.


KEPT = 4
"""So many layers stay, the ones that were asked for last."""

# Processes of another PID namespace cannot be seen, but whoever runs a layer has asked for it at its node's start.
_UNUSED_S = 7 * 86400.0


def collect(places: Places, keep: str) -> tuple[str, ...]:
    """Remove old layers and return their names; `keep`, the newest, and what is or may be in use stay."""
    ready = sorted(places.layers.glob("*/ready.json"), key=_asked_for, reverse=True)
    removed = []
    for file in ready[KEPT:]:
        folder = file.parent
        if folder.name != keep and time.time() - _asked_for(file) > _UNUSED_S and not _is_used(folder):
            removed += [folder.name] if _remove(places, folder) else []
    return tuple(removed)


def _asked_for(ready: Path) -> float:
    try:
        return ready.stat().st_mtime
    except OSError:
        return 0.0


def _is_used(folder: Path) -> bool:
    """Whether a process here was started from the layer: its name is in the command line or in PATH."""
    name = os.fsencode(str(folder))
    for process in Path("/proc").glob("[0-9]*"):
        for part in ("cmdline", "environ"):
            try:
                if name in (process / part).read_bytes():
                    return True
            except OSError:
                continue
    return False


def _remove(places: Places, folder: Path) -> bool:
    """Remove the layer unless it is being made again; the mark goes first, so that a rest is no layer."""
    with (places.layers / f"{folder.name}.lock").open("w") as lock:
        if not try_lock(lock.fileno()):
            return False
        (folder / "ready.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        (places.layers / f"{folder.name}.log").unlink(missing_ok=True)
    return True
