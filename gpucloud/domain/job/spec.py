"""The job: what the user asked for, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path

from gpucloud.domain.job.quantities import format_count

NOT_IN_FILE = ("source", "profile_steps", "trial", "own_code_sha256")  # fields of a `Job` that no key of its file says


class Policy(str, Enum):
    """How to choose between spot, on demand and waiting."""

    LEARNED = "learned"
    UNIFORM = "uniform"
    GREEDY = "greedy"
    ON_DEMAND = "on_demand"


# The model that a job trains, as far as its memory and its time need it.


USUAL_MFU_PERCENT = 35
USUAL_MFU_RECOMPUTED_PERCENT = 26
"""Of a training that computes its activations again: 6 of 8 operations are the model's own."""


class Precision(str, Enum):
    """What the model computes in; the 16-bit ones are mixed precision, with weights kept in 32 bits beside."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"  # as Transformer Engine does it: matrix products in 8 bits, everything else as in bf16


class Optimizer(str, Enum):
    """What updates the weights."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"  # with momentum
    ADAFACTOR = "adafactor"
    ADAM8BIT = "adam8bit"


class Strategy(str, Enum):
    """How the model lies on several GPUs."""

    DDP = "ddp"  # whole on each
    FSDP = "fsdp"  # weights, gradients and optimizer state sharded over all of them (ZeRO-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The job file's `model:` section.

    `tokens` are those of the whole training. `mfu_percent` is model FLOPs utilisation: the share of the GPUs' peak
    that the model's own arithmetic reaches, what is computed again not counted. From `seq` on it is the shape of a
    transformer: tokens of a sequence, sequences on each GPU at a time, width, depth, words; None is not known, and
    `recompute` whether activations are computed again in the backward pass.
    """

    params: int
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    strategy: Strategy = Strategy.DDP
    tokens: int | None = None
    mfu_percent: int = USUAL_MFU_PERCENT
    seq: int | None = None
    batch: int = 1
    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    recompute: bool = False

    def __str__(self) -> str:
        words = (format_count(self.params), self.precision.value, self.optimizer.value, self.strategy.value)
        return " ".join((*words, "recomputed") if self.recompute else words)


# The job: what the user asked for, as one frozen value.


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudTraits:
    """What is special to a cloud, for all who would else ask for it by its name."""

    section: str | None
    """The name of its section in the job file, and of the field of `Job` that holds it; None for a cloud without one.

    Machines that are held for a mended script are used again only if that field is as it was when they were rented.
    """
    owned: bool
    """The user has its machines already. They are in no market, nobody refills them, their agent's own timer ends what
    runs there, the user's keys open them, and `gc` finds no strays among them."""


class Cloud(str, Enum):
    """Where machines come from."""

    LOCAL = "local"
    AWS = "aws"
    SSH = "ssh"

    @property
    def traits(self) -> CloudTraits:
        """What is special to it."""
        match self:
            case Cloud.LOCAL:
                return CloudTraits(section=None, owned=False)
            case Cloud.AWS:
                return CloudTraits(section="aws", owned=False)
            case Cloud.SSH:
                return CloudTraits(section="ssh", owned=True)


class Market(str, Enum):
    """How machines are paid: interruptible, or not."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"
    OWNED = "owned"  # not rented: hosts that are there already


RENTED = (Market.SPOT, Market.ON_DEMAND)
"""The markets of a cloud."""


class MarketPolicy(str, Enum):
    """Which markets a job takes: one, or `auto`: spot while there is any, else on demand."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"
    AUTO = "auto"

    def allows(self, market: Market) -> bool:
        """Whether machines of that market may be interrupted."""
        return market is Market.OWNED or self is MarketPolicy.AUTO or self.value == market.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Machines wanted: `nodes` machines with `gpus` GPUs (one worker process each); `types` empty: any that fits.

    With `least_nodes` the job also trains on fewer: on so many at least (0: on all or none).
    """

    nodes: int = 1
    gpus: int = 1
    gpu: tuple[str, ...] = ()
    vram_gib: int | None = None
    market: MarketPolicy = MarketPolicy.SPOT
    regions: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    least_nodes: int = 0

    @property
    def least(self) -> int:
        """The fewest machines that the job trains on."""
        return self.least_nodes or self.nodes

    @property
    def is_range(self) -> bool:
        """Whether the job may train on fewer machines than it asks for."""
        return self.least < self.nodes


class Access(str, Enum):
    """How SSH reaches a machine on AWS."""

    PUBLIC = "public"  # its public address, from the caller's own address only
    PRIVATE = "private"  # its private address: the caller is in the network already (VPN, peering, bastion)
    SESSION_MANAGER = "session_manager"  # through AWS Systems Manager: no inbound rule at all


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsChoices:
    """The job file's `aws:` section; what is None or empty is gpucloud's own choice.

    `image` is `deep-learning`, `ubuntu`, `ami-…` or `ssm:/parameter/path`; `user` its login. `subnets` (one a zone)
    and `instance_profile` are the user's own where a company forbids making them. `alert_usd` is a month's sum over all
    jobs of a region: AWS tells `alert_email` and the SNS topic `alert_topic` (an ARN) at 50, 80 and 100 % of it.
    """

    profile: str | None = None
    image: str = "deep-learning"
    image_owners: tuple[str, ...] = ()
    user: str = "ubuntu"
    disk_gib: int = 100
    access: Access = Access.PUBLIC
    subnets: tuple[str, ...] = ()
    instance_profile: str | None = None
    permissions_boundary: str | None = None
    kms_key: str | None = None
    capacity_reservation: str | None = None
    capacity_block: str | None = None
    alert_email: str | None = None
    alert_topic: str | None = None
    alert_usd: Decimal = Decimal(100)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHost:
    """A machine that exists already. What is None is SSH's own configuration or the section's.

    `host_key` is `ssh-ed25519 AAAA…`, pinned; None: from the user's known_hosts. `private_address` is where the other
    hosts reach it, `gpus` the indices of its devices that may be used, empty for all; `jump` is `user@host:port`.
    """

    address: str
    user: str | None = None
    port: int = 22
    host_key: str | None = None
    private_address: str | None = None
    interface: str | None = None
    gpus: tuple[int, ...] = ()
    jump: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SshChoices:
    """The job file's `ssh:` section; `key` is a private key's file, None: the user's agent and usual keys.

    `usd_per_hour` is what a host costs the user; the budget counts it.
    """

    hosts: tuple[OwnHost, ...] = ()
    key: Path | None = None
    usd_per_hour: Decimal = Decimal(0)


class Launcher(str, Enum):
    """What starts the workers."""

    AUTO = "auto"  # torchrun for a script, else plain
    TORCHRUN = "torchrun"
    MPI = "mpi"  # mpirun with a hostfile, from the node of rank 0; Horovod's way too
    TENSORFLOW = "tensorflow"  # once a node, TF_CONFIG set
    PLAIN = "plain"  # once a node, the rank variables set


class DriverPolicy(str, Enum):
    """Whether gpucloud may install NVIDIA's driver; beside these a branch may be named: "580"."""

    AUTO = "auto"  # where it is missing or too old on rented machines; never on the user's own hosts
    KEEP = "keep"  # never


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChoices:
    """The job file's `machine:` section. `driver` is `auto`, `keep` or a branch such as `580`; `mig` a profile's name.

    `exporter`: DCGM's figures for Prometheus, on the node's loopback.
    """

    driver: str = DriverPolicy.AUTO.value
    mig: str | None = None
    mps: bool = False
    exporter: bool = False


class ContainerRuntime(str, Enum):
    """What runs the job's container image."""

    AUTO = "auto"  # what is there, Docker first
    DOCKER = "docker"
    APPTAINER = "apptainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerChoices:
    """How `image:` is run; `login` is the name of a secret, `user:password` of its registry."""

    runtime: ContainerRuntime = ContainerRuntime.AUTO
    login: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrors:
    """Where packages come from in place of the usual places; URLs, None for the usual one.

    `torch` is an index with torch's builds for one CUDA, as `https://download.pytorch.org/whl/cu128` is.
    """

    apt: str | None = None
    pip: str | None = None
    torch: str | None = None


class GatePolicy(str, Enum):
    """How thoroughly machines with GPUs are looked at before an attempt."""

    FULL = "full"  # compute and collectives too
    QUICK = "quick"  # what nvidia-smi and the kernel say


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePolicy:
    """GPUs used less than `below` percent for `lasting` on average: the job saves and stops."""

    below: int
    lasting: timedelta


class Layout(str, Enum):
    """How a script that does not use `gpucloud.resume` lays out its checkpoints."""

    AUTO = "auto"  # the first of these that the directory looks like
    HF = "hf"  # Hugging Face Trainer: checkpoint-500/ with trainer_state.json
    LIGHTNING = "lightning"  # *.ckpt, each whole by itself
    DCP = "dcp"  # torch.distributed.checkpoint: a folder with .metadata
    DEEPSPEED = "deepspeed"  # global_step500/, named in `latest`
    MEGATRON = "megatron"  # iter_0000500/, named in latest_checkpointed_iteration.txt
    FILE = "file"  # ckpt.pt, checkpoint.pth.tar, model-500.safetensors: each whole by itself


CHECKPOINT = "{checkpoint}"
"""In what is added to a launch: the path of the newest checkpoint that was put back, from the code folder."""


class OnNotice(str, Enum):
    """What a script that does not use `gpucloud.resume` is sent when it is to save and leave."""

    NONE = "none"
    SIGTERM = "SIGTERM"
    SIGUSR1 = "SIGUSR1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDirectory:
    """Where such a script keeps its checkpoints, below the code folder.

    With `done_file`, a folder is whole once it holds that file. Files count when nothing changed for `settle`.
    With `per_node`, each node's own folder is a part of a checkpoint; else node 0's alone is one.
    Where a checkpoint was put back, `resume_args` are added to the script's command line and `resume_variables` to its
    environment, with the checkpoint's path for CHECKPOINT in them.
    """

    path: str
    layout: Layout = Layout.AUTO
    done_file: str | None = None
    on_notice: OnNotice = OnNotice.NONE
    settle: timedelta = timedelta(seconds=1)
    per_node: bool = False
    resume_args: tuple[str, ...] = ()
    resume_variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When to save: at most one of `every` and `every_steps`; neither means auto.

    `give_up` is how many times its undisturbed cost a newly saved step may cost before the job stops; None: any.
    `directory` is for a script that saves by itself; None: the script uses `gpucloud.resume`, or saves nothing, which
    the user means with `none`.
    """

    every: timedelta | None = None
    every_steps: int | None = None
    keep: int = 3
    give_up: float | None = 20.0
    directory: CheckpointDirectory | None = None
    none: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job file. Paths are absolute; `source` is the file it was read from.

    `work` is how long the job takes on its machines when nothing disturbs it; None where the file does not say.
    `policy` is how a `deadline` is kept where both markets may be used. `hold` is how long machines stay up for a
    mended script, zero for not at all; None where the file does not say. `metrics` are patterns of numbers in output.

    Not in the file are `profile_steps`, how many steps of each rank a profiler records, None for none, `trial`, the few
    steps that are run to see whether they resume, empty for the whole job, and `own_code_sha256`, what its code was at
    its last start, this file apart: a hash as of a tree, empty where nobody knows.
    """

    name: str
    run: str
    budget_usd: Decimal
    source: Path
    code: Path
    cloud: Cloud = Cloud.LOCAL
    aws: AwsChoices = field(default_factory=AwsChoices)
    ssh: SshChoices = field(default_factory=SshChoices)
    resources: Resources = field(default_factory=Resources)
    machine: MachineChoices = field(default_factory=MachineChoices)
    gate: GatePolicy = GatePolicy.FULL
    image: str | None = None
    container: ContainerChoices = field(default_factory=ContainerChoices)
    conda: str | None = None
    setup: str | None = None
    mirrors: Mirrors = field(default_factory=Mirrors)
    launcher: Launcher = Launcher.AUTO
    store: str | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    model: Model | None = None
    work: timedelta | None = None
    deadline: timedelta | None = None
    policy: Policy = Policy.LEARNED
    idle: IdlePolicy | None = None
    hold: timedelta | None = None
    data: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    metrics: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    profile_steps: int | None = None
    trial: str = ""
    own_code_sha256: str = ""

    @property
    def path_in_code(self) -> str:
        """Where its file lies in its code folder, parts joined by `/`; empty where it lies elsewhere."""
        inside = self.source.is_relative_to(self.code)
        return self.source.relative_to(self.code).as_posix() if inside else ""

    @property
    def deadline_policy(self) -> Policy | None:
        """How the deadline is kept; None where there is none, or one market alone, so that nothing is to be chosen."""
        chooses = not self.cloud.traits.owned and self.resources.market is MarketPolicy.AUTO
        return self.policy if self.deadline is not None and chooses else None

    def hosts_on(self, cloud: Cloud) -> tuple[OwnHost, ...]:
        """Return the machines of the user's own that the job file names for that cloud."""
        match cloud:
            case Cloud.SSH:
                return self.ssh.hosts
            case Cloud.LOCAL | Cloud.AWS:
                return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """Where a job's state and file are, which folder its store is if it is one, and on which cloud it runs."""

    name: str
    store: str
    file: Path
    cloud: Cloud = Cloud.LOCAL
    profile: str | None = None
    store_identity: str | None = None
