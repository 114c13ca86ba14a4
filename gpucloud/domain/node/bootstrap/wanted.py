"""What a job needs of every node, and the record by which a new machine makes itself fit without being told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.job.code import LARGEST_CODE_BYTES
from gpucloud.domain.job.data import DataWanted
from gpucloud.domain.node.container import ImageWanted
from gpucloud.domain.node.gate.report import GateWanted
from gpucloud.domain.node.layer import LayerWanted
from gpucloud.domain.node.machine.facts import MachineWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerWanted:
    """Where a machine that drives its own job finds its order: the store's URL and the key there. No secret is here.

    `pip_mirror` is where packages come from if the machine's Python lacks what a driver needs.
    """

    store: str
    order: str
    pip_mirror: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a job needs of every node. `env` may hold secrets: it travels on standard input only.

    `power_off` is the command by which a node ends itself after its paid time, empty for none; `boto3` says that the
    job's store needs it, `torch` that gpucloud installs it where the base has none. `conda` is the environment file,
    below `code`; mirrors are indexes in place of the usual ones. `devices` are the GPUs that are the node's, empty for
    all; `store_endpoint` is where the store answers (`https://host:port`), empty where it is not in S3. `machine`,
    `data` and `gate` are None or empty where the job wants nothing of the kind; `controller` is for jobs that drive
    themselves. `of_tree`: what `setup` makes is of the tree at `code`.
    """

    package: str
    code: str
    setup: str | None
    setup_digest: str
    env: tuple[tuple[str, str], ...]
    torchrun: bool
    gpus: int
    asks_for_gpus: bool
    machine: MachineWanted | None = None
    data: tuple[DataWanted, ...] = ()
    gate: GateWanted | None = None
    image: ImageWanted | None = None
    devices: tuple[str, ...] = ()
    store_endpoint: str = ""
    power_off: tuple[str, ...] = ()
    boto3: bool = False
    torch: bool = False
    conda: str | None = None
    pip_mirror: str | None = None
    torch_mirror: str | None = None
    controller: ControllerWanted | None = None
    of_tree: bool = False

    @property
    def layer(self) -> LayerWanted | None:
        """What the job wants of its Python; None: nothing beside what the base must have."""
        always = self.setup is not None or self.conda is not None
        if not (always or self.boto3 or self.torch):
            return None
        tree = self.code if self.of_tree else ""
        return LayerWanted(digest=self.setup_digest, always=always, boto3=self.boto3, torch=self.torch, tree=tree)


def with_driver(wanted: Wanted, version: str) -> Wanted:
    """Return what is wanted of a later node: the driver of that version, which an earlier node of the job got."""
    return wanted if wanted.machine is None else replace(wanted, machine=replace(wanted.machine, version=version))


# The node record: what a new machine of a cluster needs to know to make itself fit, without a supervisor.


VERSION = 1

_INSTALLERS = ("PIP_", "UV_", "CONDA_", "MAMBA_")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPackage:
    """Our zip in the store: its key there, and the SHA-256 of its bytes."""

    key: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCode:
    """The job's code in the store: what `adapters/transfer/node_trees` makes the whole tree of; `tree` names it.

    That proves every content and the manifest against the name, so that no other hash is needed.
    """

    key: str
    tree: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The first step that a node leaves, with all that follow, to the supervisor; and why."""

    step: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What a machine reads at its first boot; no secrets. Keys are below the store; `login` is who runs jobs there.

    `wanted` is what the supervisor would want of the machine, its `code` below the login's home.
    """

    version: int
    login: str
    package: StoredPackage
    code: StoredCode | None
    wanted: Wanted
    left: Left | None = None


def record_key(cluster: str) -> str:
    """Return the key of the cluster's record."""
    return f"clusters/{cluster}/node.json"


def package_key(cluster: str, sha256: str) -> str:
    """Return the key of the package for the cluster's machines."""
    return f"clusters/{cluster}/gpucloud-{sha256}.zip"


def code_key(job: str, tree: str) -> str:
    """Return the key of the job's code."""
    return f"jobs/{job}/control/code/{tree}"


def parse_record(text: str | bytes) -> NodeRecord:
    """Return the record. Raises Malformed."""
    record = from_json(NodeRecord, text)
    if record.version != VERSION:
        raise Malformed(f"a node record of version {record.version}; this gpucloud knows {VERSION}")
    return record


def without_secrets(wanted: Wanted, secrets: frozenset[str]) -> Wanted:
    """Return what is wanted with nothing in it that is secret; `secrets` are the names in `env` that are."""
    env = tuple((name, value) for name, value in wanted.env if name not in secrets)
    image = replace(wanted.image, login=None) if wanted.image is not None else None
    return replace(wanted, env=env, image=image)


def first_left(wanted: Wanted, secrets: frozenset[str], *, has_code: bool) -> Left | None:
    """Return where a machine must stop, because what comes then needs a secret or something of the caller's machine."""
    builds = wanted.setup is not None or wanted.conda is not None
    if wanted.image is not None and wanted.image.login is not None:
        return Left(step="image", why="the login of the image's registry is a secret")
    if builds and secrets:
        return Left(step="setup", why=f"`setup:` may use {_named(secrets)}, and secrets are not in the store")
    indexes = frozenset(name for name in secrets if name.startswith(_INSTALLERS))
    if wanted.layer is not None and indexes:
        return Left(step="setup", why=f"what is installed needs {_named(indexes)}, and secrets are not in the store")
    if builds and not has_code:
        return Left(step="setup", why=f"the code is larger than {LARGEST_CODE_BYTES >> 20} MiB")
    return _data_left(wanted, frozenset(name for name in secrets if name.startswith("AWS_")))


def _data_left(wanted: Wanted, keys: frozenset[str]) -> Left | None:
    own = next((one.source for one in wanted.data if not one.in_s3), None)
    if own is not None:
        return Left(step="data", why=f"{own} lies on the caller's machine")
    if wanted.data and keys:
        return Left(step="data", why=f"the data needs {_named(keys)}, and secrets are not in the store")
    return None


def _named(secrets: frozenset[str]) -> str:
    return ", ".join(sorted(secrets))
