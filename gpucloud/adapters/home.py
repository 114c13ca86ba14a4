"""gpucloud's own folder for a user: the default store, keys, known jobs, Terraform's work and logs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.errors import StoreError
from gpucloud.domain.job import Cloud


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """Where a job's state and file are, so that its name works from any folder, and on which cloud it runs."""

    name: str
    store: str
    file: Path
    cloud: Cloud = Cloud.LOCAL
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Home:
    """The folder `GPUCLOUD_HOME`, else the platform's folder for user data. Made on first use, for its owner only."""

    root: Path

    @property
    def store(self) -> str:
        """The store of jobs that name none."""
        return str(self.root / "store")

    @property
    def cloud(self) -> Path:
        """The embedded cloud's folder."""
        return self.root / "cloud"

    @property
    def terraform(self) -> Path:
        """Where Terraform works, a folder for each cluster."""
        return self.root / "terraform"

    @property
    def tools(self) -> Path:
        """Programs that gpucloud fetched."""
        return self.root / "tools"

    @property
    def catalog(self) -> Path:
        """Machines and list prices as AWS last told them."""
        return self.root / "catalog.json"

    @property
    def layers(self) -> Path:
        """What jobs' `setup` made, shared by the nodes of the embedded fleet."""
        return self.root / "layers"

    def key(self, job: str) -> Path:
        """The private SSH key of the job's cluster; GPUCLOUD_SSH_KEY names one for every job, on every machine."""
        named = os.environ.get("GPUCLOUD_SSH_KEY")
        return Path(named).expanduser() if named else self.root / "keys" / job

    def log(self, job: str) -> Path:
        """What the background supervisor of the job says."""
        return self.root / "logs" / f"{job}.log"

    @property
    def sightings(self) -> Path:
        """When strays were first seen as such."""
        return self.root / "sightings.json"

    def keep_spec(self, job: str, spec: bytes) -> Path:
        """Write a job file as it came out of a store, and return where it is."""
        path = self.root / "specs" / job / "gpucloud.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(spec)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}", hint="GPUCLOUD_HOME names the folder") from error
        return path

    def remember(self, job: KnownJob) -> None:
        """Add the job to the known ones."""
        path = self._index / f"{job.name}.json"
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(_entry(job)))
            new.replace(path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}", hint="GPUCLOUD_HOME names the folder") from error

    def known(self) -> tuple[KnownJob, ...]:
        """Return every known job, by name."""
        paths = sorted(self._index.glob("*.json")) if self._index.is_dir() else []
        return tuple(self._read(path) for path in paths)

    def find(self, name: str) -> KnownJob | None:
        """Return the known job of that name."""
        path = self._index / f"{name}.json"
        return self._read(path) if path.is_file() else None

    @property
    def _index(self) -> Path:
        return self.root / "index"

    def _read(self, path: Path) -> KnownJob:
        try:
            entry = json.loads(path.read_text())
            return KnownJob(
                name=path.stem,
                store=entry["store"],
                file=Path(entry["file"]),
                cloud=Cloud(entry.get("cloud", "local")),
                profile=entry.get("profile"),
            )
        except (ValueError, KeyError) as error:
            raise StoreError(f"{path} is damaged", hint=f"remove it: rm {path}") from error


def _entry(job: KnownJob) -> dict[str, str | None]:
    return {"store": job.store, "file": str(job.file), "cloud": job.cloud.value, "profile": job.profile}


def open_home() -> Home:
    """Return this user's folder, made if need be. StoreError when it cannot be made."""
    named = os.environ.get("GPUCLOUD_HOME")
    root = Path(named).expanduser().absolute() if named else _platform_data() / "gpucloud"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {root}: {error.strerror}", hint="GPUCLOUD_HOME names another") from error
    return Home(root)


def _platform_data() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
