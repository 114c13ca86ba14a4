"""Terraform stacks, each made and removed whatever happened to earlier runs; and clusters of the embedded cloud."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from gpucloud.adapters.terraform.history import History, Run, read
from gpucloud.adapters.terraform.program import alone, environment, require_terraform
from gpucloud.adapters.terraform.runner import FLAG, AlreadyThere, Explain, Finished, Runner, ends_within
from gpucloud.adapters.terraform.runner import addresses as addresses_in
from gpucloud.adapters.terraform.runner import outputs as outputs_in
from gpucloud.adapters.terraform.workfolder import StateHome, WorkFolder
from gpucloud.domain.errors import ProvisionError, ToolMissing
from gpucloud.domain.variables import GPUCLOUD_TF_PLUGIN_DIR
from gpucloud.ports import ClusterSpec
from gpucloud.store.contract import Stored
from gpucloud.system import processes

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
Variables = Mapping[str, Any]
Story = Callable[[str], None]
Adopt = Callable[[Variables], Mapping[str, str]]
"""Finds what stands of a stack in the cloud, whatever the state says: address → id for an import."""


def _none_stand(variables: Variables) -> Mapping[str, str]:  # noqa: ARG001
    return {}


def _stands() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A module under a name. `root` holds the working folders, `home` the state (None: in the working folder).

    Credentials come from `env`, the whole environment. A killed caller's Terraform ends by itself; the next call
    waits for it. Raises ProvisionError, CredentialsError, ToolMissing, StoreError.
    """

    name: str
    module: Path
    root: Path
    env: Mapping[str, str]
    home: StateHome | None = None
    least: tuple[int, int] = (1, 5)
    plugin_dir: Path | None = None
    limit_s: float = 1800.0
    wait_s: float = 60.0
    explain: Explain | None = None
    adopt: Adopt = _none_stand

    @property
    def logs(self) -> Path:
        """Where Terraform's own words are kept."""
        return self.folder.path / "logs"

    def outputs(self) -> Mapping[str, Any] | None:
        """Return the outputs of the last good apply if its state still stands; runs nothing."""
        last, proven = self.history.last() if self.history else (None, False)
        return last.outputs if last and proven else None

    def apply(
        self, wanted: Callable[[Variables], Variables], *, story: Story, stands: Callable[[], bool] = _stands
    ) -> Mapping[str, Any]:
        """Make the cloud what the module says and return its outputs; nothing runs when that is proven already.

        `wanted` is given the variables of the last apply that ended well (empty: none) and returns those of this.
        `stands` has the last word: whether what the proof speaks of is still there.
        """
        folder, history = self.folder, self.history
        with alone(folder.path, limit_s=self.limit_s, story=story) as lock_fd:
            last, proven = history.last() if history else (None, False)
            variables = wanted(last.variables if last else {})
            digest = folder.digest(self.module, variables, self.backend or b"")
            if last is not None and proven and last.digest == digest and stands():
                return last.outputs
            run = _Run(self, "apply", variables, lock_fd, story)
            applied = run.apply()
            outputs = outputs_in(applied.events)
            run.keep(digest, outputs)
            return outputs

    def destroy(self, *, story: Story, fallback: Variables | None = None) -> None:
        """Remove everything, check that nothing is left in the state, and forget the stack.

        `fallback` are variables for a stack that stands in the cloud but of which no record is left.
        """
        folder, history = self.folder, self.history
        with alone(folder.path, limit_s=self.limit_s, story=story) as lock_fd:
            variables = (history.variables() if history else None) or folder.variables() or fallback or {}
            if (history is not None and variables) or (folder.path / "terraform.tfstate").exists():
                _Run(self, "destroy", variables, lock_fd, story).destroy()
            if history is not None:
                history.forget()
            if folder.path.exists():
                shutil.rmtree(folder.path)

    def runner(self, lock_fd: int, story: Story) -> Runner:
        """Return what runs Terraform's commands in the working folder, initialised."""
        tools = self.root.parent / "tools"
        program = require_terraform(self.env, self.root / "terraform-version", least=self.least, tools=tools)
        env = environment(self.env) | self._cache
        folder = self.folder
        runner = Runner(
            program, folder.path, env=env, lock_fd=lock_fd, story=story, limit_s=self.limit_s, explain=self.explain
        )
        cache = self._cache.get("TF_PLUGIN_CACHE_DIR")
        folder.initialise(runner, plugin_dir=self._plugins, cache=cache, story=story)
        return runner

    @property
    def folder(self) -> WorkFolder:
        """Where Terraform works."""
        if not _NAME.fullmatch(self.name):
            raise ProvisionError(
                f"{self.name!r} is not a cluster's name", hint="use lower-case letters, digits and hyphens"
            )
        return WorkFolder(self.root / self.name)

    @property
    def history(self) -> History | None:
        """What was done before; None where the state is in the working folder alone."""
        return History(self.home, self.folder.path) if self.home else None

    @property
    def backend(self) -> bytes | None:
        """What Terraform is told about where its state is."""
        return self.home.backend_file if self.home else None

    @property
    def _plugins(self) -> str | None:
        return str(self.plugin_dir) if self.plugin_dir else self.env.get(GPUCLOUD_TF_PLUGIN_DIR) or None

    @property
    def _cache(self) -> dict[str, str]:
        """A provider is 675 MB: it is kept once, unless the user has said where."""
        if self._plugins or "TF_CLI_CONFIG_FILE" in self.env or "TF_PLUGIN_CACHE_DIR" in self.env or not self.home:
            return {}
        # What is in it is taken where the module's lock names its hash; else the archive is fetched, and compared.
        return {"TF_PLUGIN_CACHE_DIR": str(self.root.parent / "plugins")}


class _Run:
    """One change of a stack, under its lock."""

    def __init__(self, stack: Stack, command: str, variables: Variables, lock_fd: int, story: Story) -> None:
        self._stack, self._variables, self._story = stack, variables, story
        self._home, self._history = stack.home, stack.history
        self._folder = stack.folder
        self._folder.fill(stack.module, variables, stack.backend)
        self._runner = stack.runner(lock_fd, story)
        self._intent = partial(
            Run,
            id=secrets.token_hex(8),
            command=command,
            host=socket.gethostname(),
            space=processes.space(),
            ends_within_s=ends_within(stack.limit_s),
            variables=variables,
        )
        self._begun: Run | None = None
        if self._home is not None:
            self._unlock(self._home)

    def apply(self) -> Finished:
        """Apply, with what stands but is not in the state taken into it first."""
        try:
            with self._folder.importing(self._lost()):
                return self._change("apply")
        except AlreadyThere:
            found = self._unknown()
            if not found:
                raise
            self._story("some of it stands already: taking it into Terraform's state")
            with self._folder.importing(found):
                return self._change("apply")

    def destroy(self) -> None:
        """Destroy everything, what stands but is not in the state too."""
        lost = self._lost()
        if lost:
            with self._folder.importing(lost):
                self._change("apply", target=sorted(lost))
        elif self._history is not None and not self._history.known():
            return
        destroyed = self._change("destroy")
        left = addresses_in(self._runner.cmd("show", json=FLAG).events)
        if left:
            raise ProvisionError(f"{self._stack.name} still has {', '.join(left)}", hint=f"see {destroyed.log}")

    def keep(self, digest: str, outputs: Mapping[str, Any]) -> None:
        """Put on record that the apply ended well."""
        if self._history is not None and self._begun is not None:
            self._history.keep(self._begun, digest=digest, outputs=outputs)

    def _lost(self) -> Mapping[str, str]:
        """Return what stands but is not in the state; nobody is asked where the state is beyond doubt."""
        if self._history is None:
            return {}
        self._history.mend(self._story)
        if self._history.is_settled():
            return {}
        found = self._unknown()
        if found:
            self._story(f"taking {len(found)} resources that stand already into Terraform's state")
        return found

    def _unknown(self) -> Mapping[str, str]:
        if self._history is None:
            return {}
        known = self._history.known()
        found = self._stack.adopt(self._variables)
        return {to: found[to] for to in found if to not in known and self._folder.declares(to)}

    def _change(self, command: str, **options: Any) -> Finished:
        # Our own lock comes first; Terraform's is waited for too, in case a Terraform outlived even its guard.
        wait_s = self._stack.limit_s if self._home is None else self._stack.wait_s
        change = partial(
            self._runner.cmd,
            command,
            auto_approve=FLAG,
            json=FLAG,
            input=False,
            lock_timeout=f"{wait_s:.0f}s",
            begin=self._begin,
            **options,
        )
        try:
            return change()
        except ToolMissing:
            self._folder.forget_initialised()  # a plugin that was there is gone: the next run fetches it
            raise

    def _begin(self, group: int) -> None:
        if self._history is not None:
            self._begun = self._intent(group=group)
            self._history.begin(self._begun)

    def _unlock(self, home: StateHome) -> None:
        lock = stuck_lock(home, wait_s=self._stack.wait_s, story=self._story)
        if lock is not None:
            self._runner.cmd("force-unlock", lock, force=FLAG)


# Terraform's lock object in S3 when its Terraform is dead: removed only when that is proven.


_POLL_S = 0.5


def stuck_lock(home: StateHome, *, wait_s: float, story: Callable[[str], None]) -> str | None:
    """Return the id of a lock whose Terraform is proven dead; None when nothing is locked.

    A living one is waited for; ProvisionError after `wait_s`: who holds it, since when, until when at most.
    """
    deadline, told = time.monotonic() + wait_s, False
    while (lock := home.store.get(home.lock)) is not None:
        about = _about(lock)
        stored = home.store.get(home.run)
        run = read(Run, stored.data) if stored else None
        if run is not None and _is_dead(run, lock, about):
            story(f"Terraform's lock on {home.name} was left by a run that is dead; removing it")
            return str(about.get("ID", ""))
        if time.monotonic() > deadline:
            raise _held(home, run, lock, about)
        if not told:
            story(f"{about.get('Who', 'somebody')} is at work on {home.name} with Terraform; waiting for it")
            told = True
        time.sleep(_POLL_S)
    return None


def _is_dead(run: Run, lock: Stored, about: dict[str, Any]) -> bool:
    if not _is_of(run, about):
        return False
    return run.is_gone() or lock.store_time - lock.modified > timedelta(seconds=run.ends_within_s)


def _is_of(run: Run, about: dict[str, Any]) -> bool:
    """Whether the lock is that run's: somebody may have run Terraform by hand, whom nothing here ends."""
    return str(about.get("Who", "")).rpartition("@")[2] == run.host


def _held(home: StateHome, run: Run | None, lock: Stored, about: dict[str, Any]) -> ProvisionError:
    since = lock.modified.astimezone(timezone.utc)
    message = f"{about.get('Who', 'somebody')} holds Terraform's lock on {home.name} since {_clock(since)}"
    if run is None or not _is_of(run, about):
        return ProvisionError(
            message, hint=f"if that run is dead: delete the object {home.lock} in {home.store.url}, then try again"
        )
    until = since + timedelta(seconds=run.ends_within_s)
    return ProvisionError(message, hint=f"try again when it has ended; the lock is taken over at {_clock(until)}")


def _clock(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _about(lock: Stored) -> dict[str, Any]:
    try:
        value = json.loads(lock.data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# Clusters made and removed by Terraform alone, state in the working folder: what the embedded cloud needs.


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
        stack = self._stack(spec.name)
        variables = common_variables(spec, cidr=self._cidr)
        group = stack.apply(lambda _: variables, story=story).get("group_name")
        if not isinstance(group, str):
            raise ProvisionError("terraform apply: the module has no output group_name", hint=f"see {stack.logs}")
        return group

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """Remove everything that `ensure` made, check that nothing is left in the state, and forget the cluster."""
        self._stack(group).destroy(story=story)

    def _stack(self, name: str) -> Stack:
        return Stack(
            name=name,
            module=self._module_dir,
            root=self._work_root,
            env=self._env,
            plugin_dir=self._plugin_dir,
            limit_s=self._limit_s,
        )


def common_variables(spec: ClusterSpec, *, cidr: str) -> dict[str, object]:
    """Return the variables that every cloud's cluster module takes; none of them is a secret."""
    return {
        "name": spec.name,
        "region": spec.region,
        "zones": list(spec.zones),
        "node_type": spec.node_type,
        "market": spec.market.value,
        "tags": dict(spec.tags),
        "access": {"public_key": spec.public_key, "cidr": cidr},
        "store": spec.store,
        "unattended": spec.unattended,
    }
