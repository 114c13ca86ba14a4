"""Clusters made and removed by Terraform: one working folder per cluster, with a copy of the module and its state."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpucloud.adapters.terraform import events
from gpucloud.adapters.terraform.program import environment, require_terraform
from gpucloud.adapters.terraform.runner import FLAG, Finished, Runner
from gpucloud.domain.errors import ProvisionError
from gpucloud.ports import ClusterSpec

_POLL_S = 0.02
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
# A module of resources of the built-in provider alone runs without `terraform init` (measured with 1.11).
_NEEDS_INIT = re.compile(r"^\s*(required_providers|backend|cloud|module|provider)\b", re.MULTILINE)


class TerraformProvisioner:
    """The `Provisioner` port over Terraform. A killed caller's Terraform ends by itself; the next call waits for it."""

    def __init__(
        self,
        module_dir: Path,
        work_root: Path,
        env: Mapping[str, str],
        *,
        cidr: str = "127.0.0.0/8",
        plugin_dir: Path | None = None,
        limit_s: float = 1800.0,
    ) -> None:
        """`env` is the whole environment; `cidr` is where SSH may come from; `plugin_dir` holds provider plugins."""
        self._module_dir = module_dir
        self._work_root = work_root
        self._env = dict(env)
        self._cidr = cidr
        self._plugin_dir = plugin_dir
        self._limit_s = limit_s

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  one region
        """Return the cluster's own name."""
        return name

    def image(self, region: str) -> None:
        """Return None: machines of this cloud have no image."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make what costs nothing and return the node group's name; repeated, it changes only what differs."""
        with self._alone(spec.name, story) as lock_fd:
            folder = self._folder(spec.name)
            folder.mkdir(exist_ok=True, mode=0o700)
            _copy_module(self._module_dir, folder)
            _write(folder / "terraform.tfvars.json", json.dumps(self._variables(spec), indent=2).encode())
            runner = self._runner(folder, lock_fd, story)
            self._initialise(runner, folder)
            applied = self._change(runner, "apply")
            group = events.outputs(applied.events).get("group_name")
            if not isinstance(group, str):
                raise ProvisionError("terraform apply: the module has no output group_name", hint=f"see {applied.log}")
            return group

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """Remove everything that `ensure` made, check that nothing is left in the state, and forget the cluster."""
        with self._alone(group, story) as lock_fd:
            folder = self._folder(group)
            if (folder / "terraform.tfstate").exists():
                runner = self._runner(folder, lock_fd, story)
                destroyed = self._change(runner, "destroy")
                left = _addresses(runner.cmd("show", json=FLAG))
                if left:
                    raise ProvisionError(f"{group} still has {', '.join(left)}", hint=f"see {destroyed.log}")
            if folder.exists():
                shutil.rmtree(folder)

    def _variables(self, spec: ClusterSpec) -> dict[str, object]:
        return {
            "name": spec.name,
            "region": spec.region,
            "zones": list(spec.zones),
            "node_type": spec.node_type,
            "market": spec.market.value,
            "tags": dict(spec.tags),
            "access": {"public_key": spec.public_key, "cidr": self._cidr},
            "store": spec.store,
        }

    def _folder(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ProvisionError(f"{name!r} is not a cluster's name", hint="use lower-case letters, digits and hyphens")
        return self._work_root / name

    def _runner(self, folder: Path, lock_fd: int, story: Callable[[str], None]) -> Runner:
        program = require_terraform(self._env, self._work_root / "terraform-version")
        env = environment(self._env)
        return Runner(program, folder, env=env, lock_fd=lock_fd, story=story, limit_s=self._limit_s)

    def _initialise(self, runner: Runner, folder: Path) -> None:
        sources = b"\0".join(path.read_bytes() for path in sorted(folder.glob("*.tf")))
        if not _NEEDS_INIT.search(sources.decode()):
            return
        digest = hashlib.sha256(sources + bytes(str(self._plugin_dir), "utf-8")).hexdigest()
        stamp = folder / ".terraform" / "gpucloud-initialised"
        if stamp.exists() and stamp.read_text() == digest:
            return
        runner.cmd("init", input=False, no_color=FLAG, plugin_dir=str(self._plugin_dir) if self._plugin_dir else None)
        stamp.parent.mkdir(exist_ok=True)
        _write(stamp, digest.encode())

    def _change(self, runner: Runner, command: str) -> Finished:
        # Our own lock comes first; Terraform's is waited for too, in case a Terraform outlived even its keeper.
        timeout = f"{self._limit_s:.0f}s"
        return runner.cmd(command, auto_approve=FLAG, json=FLAG, input=False, lock_timeout=timeout)

    @contextlib.contextmanager
    def _alone(self, name: str, story: Callable[[str], None]) -> Iterator[int]:
        """Hold the cluster's lock, which outlives this process while a Terraform that it started still runs."""
        self._work_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder(name).with_suffix(".lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(fd, name, story)
            yield fd
        finally:
            os.close(fd)

    def _lock(self, fd: int, name: str, story: Callable[[str], None]) -> None:
        deadline = time.monotonic() + self._limit_s
        told = False
        while not _try_lock(fd):
            if not told:
                story(f"another Terraform run for {name} has not ended; waiting for it")
                told = True
            if time.monotonic() > deadline:
                raise ProvisionError(
                    f"another Terraform run for {name} has not ended after {self._limit_s:.0f} s",
                    hint=f"see the newest file in {self._folder(name) / 'logs'}",
                )
            time.sleep(_POLL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy_module(source: Path, target: Path) -> None:
    """Make the target's *.tf files equal to the source's; files that are equal already are left alone."""
    wanted = {path.name: path.read_bytes() for path in source.glob("*.tf")}
    for path in target.glob("*.tf"):
        if path.name not in wanted:
            path.unlink()
    for name, data in wanted.items():
        _write(target / name, data)


def _write(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() == data:
        return
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(data)
    beside.replace(path)


def _addresses(shown: Finished) -> tuple[str, ...]:
    """Return the addresses in a `show -json` answer, those of child modules too."""
    modules = [event.get("values", {}).get("root_module", {}) for event in shown.events]
    found: list[str] = []
    while modules:
        module = modules.pop()
        found += [resource["address"] for resource in module.get("resources", ())]
        modules += module.get("child_modules", ())
    return tuple(sorted(found))
