"""The folder that Terraform works in: a copy of the module, its variables, its backend, its state's home."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.adapters.terraform.program import alone
from gpucloud.adapters.terraform.runner import FLAG, Runner
from gpucloud.domain.errors import StoreError
from gpucloud.store import ObjectStore
from gpucloud.store.directory import DirectoryStore
from gpucloud.system.wholefile import write_whole

# A module of resources of the built-in provider alone runs without `terraform init` (measured with 1.11).
_NEEDS_INIT = re.compile(r"^\s*(required_providers|backend|cloud|module|provider)\b", re.MULTILINE)
_VARIABLES, _BACKEND, _IMPORTS = "terraform.tfvars.json", "backend.tf.json", "imports.tf.json"
_LOCK = ".terraform.lock.hcl"


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """One stack's folder on this machine."""

    path: Path

    def digest(self, module: Path, variables: Mapping[str, Any], backend: bytes) -> str:
        """Return what tells this module with these variables from any other."""
        parts = [b"%s\0%s" % (path.name.encode(), path.read_bytes()) for path in sorted(_files(module))]
        return hashlib.sha256(b"\0".join([*parts, _json(variables), backend])).hexdigest()

    def fill(self, module: Path, variables: Mapping[str, Any], backend: bytes | None) -> None:
        """Make the folder hold the module, its variables and its backend, and no imports of an earlier run."""
        self.path.mkdir(exist_ok=True, mode=0o700)
        _copy_module(module, self.path)
        write(self.path / _VARIABLES, _json(variables))
        if backend is not None:
            write(self.path / _BACKEND, backend)
        (self.path / _IMPORTS).unlink(missing_ok=True)

    def variables(self) -> Mapping[str, Any] | None:
        """Return the variables of the last run here, if there was one."""
        path = self.path / _VARIABLES
        return json.loads(path.read_bytes()) if path.exists() else None

    @contextlib.contextmanager
    def importing(self, ids: Mapping[str, str]) -> Iterator[None]:
        """Let Terraform take these addresses (address → the cloud's id) into its state during the block."""
        path = self.path / _IMPORTS
        if ids:
            write(path, _json({"import": [{"to": to, "id": ids[to]} for to in sorted(ids)]}))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def declares(self, address: str) -> bool:
        """Whether the module has a resource block of this address."""
        kind, _, rest = address.partition(".")
        block = re.compile(rf'^\s*resource\s+"{re.escape(kind)}"\s+"{re.escape(rest.partition("[")[0])}"', re.MULTILINE)
        return any(block.search(path.read_text()) for path in self.path.glob("*.tf"))

    def initialise(
        self, runner: Runner, *, plugin_dir: str | None, cache: str | None, story: Callable[[str], None]
    ) -> None:
        """Run `terraform init` if the module, the backend or the place of the plugins is not what it was."""
        files = sorted([*self.path.glob("*.tf"), *self.path.glob(_BACKEND)])
        sources = b"\0".join(path.read_bytes() for path in files)
        if not (_NEEDS_INIT.search(sources.decode()) or (self.path / _BACKEND).exists()):
            return
        lock = self.path / _LOCK
        parts = (sources, lock.read_bytes() if lock.exists() else b"", bytes(str(plugin_dir), "utf-8"))
        digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
        if self._stamp.exists() and self._stamp.read_text() == digest:
            return
        # A provider whose hash the module's lock does not name is refused. Without a lock Terraform writes its own.
        lockfile = "readonly" if lock.exists() else None
        with _plugins_alone(cache, story):
            runner.cmd("init", input=False, no_color=FLAG, reconfigure=FLAG, plugin_dir=plugin_dir, lockfile=lockfile)
        self._stamp.parent.mkdir(exist_ok=True)
        write(self._stamp, digest.encode())

    def forget_initialised(self) -> None:
        """Let the next run initialise again."""
        self._stamp.unlink(missing_ok=True)

    @property
    def _stamp(self) -> Path:
        return self.path / ".terraform" / "gpucloud-initialised"


def write(path: Path, data: bytes) -> None:
    """Make the file hold the data; it appears whole, and one that holds it already is left alone."""
    if path.exists() and path.read_bytes() == data:
        return
    write_whole(path, data)


@contextlib.contextmanager
def _plugins_alone(cache: str | None, story: Callable[[str], None]) -> Iterator[None]:
    """Only one `init` at a time fills the plugin cache: Terraform does not lock it."""
    if cache is None:
        yield
        return
    folder = Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, limit_s=900.0, story=story) as fd:
        os.set_inheritable(fd, False)  # noqa: FBT003  the call takes no keyword
        yield


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


def _copy_module(source: Path, target: Path) -> None:
    """Make the target's *.tf files and lock equal to the source's; files that are equal already are left alone."""
    wanted = {path.name: path.read_bytes() for path in _files(source)}
    for path in target.glob("*.tf"):
        if path.name not in wanted:
            path.unlink()
    for name, data in wanted.items():
        write(target / name, data)


def _files(module: Path) -> tuple[Path, ...]:
    return (*module.glob("*.tf"), *module.glob(_LOCK))


# Where a stack's Terraform state is kept: in the store, beside the record of what was done to it.


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHome:
    """The keys of one stack in a store. `earlier` gives the bytes of former versions of the state, newest first."""

    store: ObjectStore
    name: str
    backend: Mapping[str, Any]
    earlier: Callable[[], Iterable[bytes]] = tuple

    @property
    def state(self) -> str:
        """The key of Terraform's own state."""
        return _state_key(self.name)

    @property
    def lock(self) -> str:
        """The key of Terraform's lock on it, in S3."""
        return f"{self.state}.tflock"

    @property
    def run(self) -> str:
        """The key of the intent: what was begun last."""
        return f"terraform/{self.name}/run.json"

    @property
    def applied(self) -> str:
        """The key of the proof: what the last apply that ended well left."""
        return f"terraform/{self.name}/applied.json"

    @property
    def backend_file(self) -> bytes:
        """What `backend.tf.json` says; no credentials: these come from the environment."""
        return json.dumps({"terraform": {"backend": dict(self.backend)}}, indent=2).encode()


def in_bucket(
    store: ObjectStore,
    name: str,
    *,
    region: str,
    endpoint: str | None,
    earlier: Callable[[], Iterable[bytes]] = tuple,
) -> StateHome:
    """Return the home in an `s3://bucket/prefix` store; `region` is the bucket's, `endpoint` that of an own server."""
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    backend: dict[str, Any] = {
        "bucket": bucket,
        "key": "/".join(filter(None, (prefix, _state_key(name)))),
        "region": region,
        "use_lockfile": True,
        "encrypt": True,
        "skip_region_validation": True,
        "skip_requesting_account_id": True,
    }
    if endpoint:
        backend["use_path_style"] = True
    return StateHome(store=store, name=name, backend={"s3": backend}, earlier=earlier)


def in_directory(store: DirectoryStore, name: str) -> StateHome:
    """Return the home in a store that is a directory."""
    path = store.root / _state_key(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {path.parent}: {error.strerror}", hint="name another store") from error
    backup = path.with_name(f"{path.name}.backup")

    def earlier() -> Iterator[bytes]:
        if backup.exists():
            yield backup.read_bytes()

    return StateHome(store=store, name=name, backend={"local": {"path": str(path)}}, earlier=earlier)


def _state_key(name: str) -> str:
    return f"terraform/{name}/terraform.tfstate"
