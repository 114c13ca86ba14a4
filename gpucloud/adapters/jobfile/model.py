"""The job file's keys: the one place that names them, with what each is for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gpucloud.adapters.jobfile import kinds
from gpucloud.adapters.jobfile.values import Wanted
from gpucloud.domain.job.spec import (
    AwsChoices,
    CheckpointDirectory,
    CheckpointPolicy,
    Cloud,
    ContainerChoices,
    GatePolicy,
    Launcher,
    MachineChoices,
    Mirrors,
    Model,
    OwnHost,
    Policy,
    Resources,
    SshChoices,
)

_RESOURCES = Resources()
_CHECKPOINT = CheckpointPolicy()
_DIRECTORY = CheckpointDirectory(path="")
_AWS = AwsChoices()
_SSH = SshChoices()
_HOST = OwnHost(address="")
_MACHINE = MachineChoices()
_CONTAINER = ContainerChoices()
_MIRRORS = Mirrors()
_MODEL = Model(params=1)


def _keys(value: object) -> object:
    if not isinstance(value, dict | BaseModel):
        raise Wanted("a mapping of keys to values")
    return value


def _or_words(schema: dict[str, Any]) -> None:
    """Say that each item of a list may be one word too."""
    schema["items"] = {"anyOf": [schema["items"], {"type": "string", "minLength": 1}]}


def _or_none(schema: dict[str, Any]) -> None:
    """Say that the word `none` may stand in place of the mapping."""
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"enum": ["none"]}]


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ResourcesKeys(_Keys):
    """The machines wanted."""

    nodes: kinds.Nodes = Field(
        default=_RESOURCES.nodes, description="Machines; of a range, such as 2-4, the job trains on as many as it gets."
    )
    gpus: kinds.GpusPerNode = Field(
        default=_RESOURCES.gpus, description="GPUs per machine; each gets one worker process."
    )
    gpu: kinds.GpuModels = Field(default=_RESOURCES.gpu, description="GPU models that will do; any when left out.")
    vram_gib: kinds.Gib | None = Field(default=None, description="Least memory per GPU, in GiB.")
    market: kinds.Market = Field(
        default=_RESOURCES.market,
        description="spot: cheap and interruptible. on_demand: neither. auto: spot while there is any.",
    )
    regions: kinds.Regions = Field(
        default=_RESOURCES.regions, description="Regions that will do; your AWS region alone when left out."
    )
    types: kinds.Types = Field(default=_RESOURCES.types, description="Instance types that will do; any when left out.")


class AwsKeys(_Keys):
    """What only AWS asks; gpucloud chooses what is left out."""

    profile: kinds.Line | None = Field(default=None, description="A profile of your AWS configuration.")
    image: kinds.Image = Field(default=_AWS.image, description="The machine image, pinned when the job starts.")
    image_owners: kinds.Owners = Field(
        default=_AWS.image_owners, description="Accounts whose images may run too, beside amazon, Canonical and yours."
    )
    user: kinds.Line = Field(default=_AWS.user, description="The image's login.")
    disk_gib: kinds.Gib = Field(default=_AWS.disk_gib, description="Size of each machine's disk.")
    access: kinds.Access = Field(
        default=_AWS.access,
        description="How SSH reaches machines: public address (yours only), private address, or session_manager.",
    )
    subnets: kinds.Subnets = Field(
        default=_AWS.subnets, description="Your own subnets, one a zone; a network is made when left out."
    )
    instance_profile: kinds.Line | None = Field(default=None, description="Your own instance profile for machines.")
    permissions_boundary: kinds.Line | None = Field(default=None, description="ARN for the role that is made.")
    kms_key: kinds.KmsKey | None = Field(default=None, description="Id or ARN of your key for disks.")
    capacity_reservation: kinds.Line | None = Field(default=None, description="Id of a capacity reservation to use.")
    capacity_block: kinds.Line | None = Field(default=None, description="Id of a capacity block to use.")
    alert_email: kinds.Email | None = Field(
        default=None,
        description="Who gets AWS Budgets' own warning; it counts by the tag `gpucloud:managed` (money.md).",
    )
    alert_topic: kinds.TopicArn | None = Field(default=None, description="An SNS topic that gets it too, by its ARN.")
    alert_usd: kinds.Usd = Field(
        default=_AWS.alert_usd,
        description="A month's sum over all jobs of a region: AWS warns at 50, 80 and 100 %, once its tag is active.",
    )


class HostKeys(_Keys):
    """One host that exists already."""

    address: kinds.HostAddress = Field(description="Its name or address, for SSH.")
    user: kinds.Line | None = Field(default=None, description="Your login there.")
    port: kinds.Port = Field(default=_HOST.port, description="SSH's port there.")
    host_key: kinds.HostKey | None = Field(
        default=None, description="Its public host key; from your known_hosts when left out."
    )
    private_address: kinds.HostAddress | None = Field(
        default=None, description="Where the other hosts reach it, if not at its address."
    )
    interface: kinds.Line | None = Field(default=None, description="The network interface between the hosts.")
    gpus: kinds.Devices = Field(default=_HOST.gpus, description="Indices of the GPUs to use; all when left out.")
    jump: kinds.Line | None = Field(default=None, description="A host that SSH goes through: user@host:port.")


class SshKeys(_Keys):
    """Hosts that exist already, for cloud: ssh."""

    hosts: Annotated[tuple[Annotated[HostKeys, kinds.HOST], ...], BeforeValidator(kinds.listed)] = Field(
        default=(), description="user@address:port, or a mapping with more to say.", json_schema_extra=_or_words
    )
    key: kinds.Line | None = Field(
        default=None, description="Your private key's file; your agent and usual keys when left out."
    )
    price: kinds.UsdOrNothing = Field(default=_SSH.usd_per_hour, description="What a host costs you an hour.")


class MachineKeys(_Keys):
    """What machines are given beside the job's own software."""

    driver: kinds.Driver = Field(
        default=_MACHINE.driver,
        description="auto: NVIDIA's driver is installed where a rented machine lacks it. keep: never. 580: a branch.",
    )
    mig: kinds.MigProfile | None = Field(default=None, description="Divide each GPU into such MIG devices.")
    mps: kinds.Flag = Field(default=_MACHINE.mps, description="Run NVIDIA's Multi-Process Service.")
    exporter: kinds.Flag = Field(default=_MACHINE.exporter, description="Run the DCGM exporter on the node's loopback.")


class ContainerKeys(_Keys):
    """How the job's container image is run."""

    runtime: kinds.Runtime = Field(
        default=_CONTAINER.runtime, description="docker, apptainer, or auto: what is there, Docker first."
    )
    login: kinds.SecretName | None = Field(
        default=None, description="One of `secrets`, holding user:password for the image's registry."
    )


class MirrorsKeys(_Keys):
    """Where packages come from in place of the usual places."""

    apt: kinds.Url | None = Field(default=_MIRRORS.apt, description="Ubuntu's archive.")
    pip: kinds.Url | None = Field(default=_MIRRORS.pip, description="PyPI's simple index.")
    torch: kinds.Url | None = Field(default=_MIRRORS.torch, description="An index with a torch for the machines.")


class ModelKeys(_Keys):
    """The model that is trained: what `gpucloud plan` sizes GPUs and time by."""

    params: kinds.Count = Field(description="Parameters, such as 7B or 350M.")
    precision: kinds.PrecisionName = Field(
        default=_MODEL.precision,
        description="What it computes in: bf16, fp16 (both mixed with fp32), fp8 (Transformer Engine), or fp32.",
    )
    optimizer: kinds.OptimizerName = Field(
        default=_MODEL.optimizer, description="adamw, adam, sgd (with momentum), adafactor or adam8bit."
    )
    strategy: kinds.StrategyName = Field(
        default=_MODEL.strategy, description="ddp: whole on each GPU. fsdp: sharded over all GPUs of the job."
    )
    tokens: kinds.Count | None = Field(
        default=None,
        description="Tokens of the whole training, such as 300B: the amount of work, if `work` is left out.",
    )
    mfu: kinds.Percent = Field(
        default=_MODEL.mfu_percent,
        description="Model FLOPs utilisation: the share of the GPUs' peak that is reached; 26% where it is left out"
        " and activations are recomputed, which it does not count.",
    )
    seq: kinds.Count | None = Field(
        default=None, description="Tokens of a sequence; activations are counted when it is named."
    )
    batch: kinds.Count = Field(default=_MODEL.batch, description="Sequences on each GPU at a time.")
    hidden: kinds.Count | None = Field(default=None, description="Width of the model; estimated when left out.")
    layers: kinds.Count | None = Field(default=None, description="Depth of the model; estimated when left out.")
    vocab: kinds.Count | None = Field(default=None, description="Words that it knows: the width of its last layer.")
    recompute: kinds.Flag = Field(
        default=_MODEL.recompute, description="Whether activations are computed again in the backward pass."
    )


class IdleKeys(_Keys):
    """When a job that leaves its GPUs idle is stopped."""

    below: kinds.Percent = Field(description="GPU use in percent, averaged over all GPUs.")
    for_: kinds.Span = Field(alias="for", description="For how long.")


class CheckpointKeys(_Keys):
    """When checkpoints are saved, how many stay, and where a script that saves by itself puts them."""

    every: kinds.Cadence = Field(default=None, description="auto, a span of time, or a number of steps.")
    keep: kinds.Keep = Field(default=_CHECKPOINT.keep, description="Newest checkpoints that are kept.")
    give_up: kinds.Times = Field(
        default=_CHECKPOINT.give_up,
        description="Stop when interruptions make newly saved steps cost so many times as much as undisturbed; never.",
    )
    directory: kinds.Inside | None = Field(
        default=None,
        description="For a script without gpucloud.resume: the folder of its own checkpoints, below the code folder.",
    )
    layout: kinds.LayoutName = Field(
        default=_DIRECTORY.layout,
        description="What is whole there: hf, lightning, dcp, deepspeed, megatron, file, or auto: as the folder looks.",
    )
    done_file: kinds.FileName | None = Field(
        default=None, description="In place of a layout: a folder is whole once the script wrote this file into it."
    )
    on_notice: kinds.OnNoticeName = Field(
        default=_DIRECTORY.on_notice,
        description="The signal by which the script is asked to save and leave: SIGTERM (Trainer heeds it by "
        "enable_jit_checkpoint=True, Lightning by save_on_exception=True), SIGUSR1 to its own handler, or none.",
    )
    per_node: kinds.Flag = Field(
        default=_DIRECTORY.per_node,
        description="Whether each node's own folder is a part of a checkpoint; else node 0's alone is one.",
    )
    settle: kinds.Span = Field(
        default=_DIRECTORY.settle, description="How long nothing may change before a checkpoint there counts."
    )
    resume_args: kinds.Words = Field(
        default=_DIRECTORY.resume_args,
        description="Words for the script's command line where a checkpoint was put back, as --resume {checkpoint}: "
        "with the newest one's path; in a `run` that needs a shell, $GPUCLOUD_RESUME_ARGS says where.",
    )
    resume_variables: kinds.Env = Field(
        default_factory=dict, description="Environment variables that the script has where a checkpoint was put back."
    )


class NoCheckpoints(CheckpointKeys):
    """`checkpoint: none`: the script saves nothing, and that is meant."""


def _checkpoint(value: object) -> object:
    if value == "none":
        return NoCheckpoints()
    if not isinstance(value, dict | BaseModel):
        raise Wanted("a mapping of keys to values, or none")
    return value


class JobKeys(_Keys):
    """One gpucloud job."""

    name: kinds.Name = Field(description="The job's name, unique within the store.")
    run: kinds.Text = Field(description="A Python script with its arguments (torchrun starts it), or a command line.")
    budget: kinds.Usd = Field(
        description="What machines, disks and addresses may cost, over all attempts. Never exceeded."
    )
    cloud: kinds.Cloud = Field(default=Cloud.LOCAL, description="Where machines come from.")
    aws: Annotated[AwsKeys, BeforeValidator(_keys)] = Field(
        default=AwsKeys(), description="For cloud: aws, what only AWS asks."
    )
    ssh: Annotated[SshKeys, BeforeValidator(_keys)] = Field(
        default=SshKeys(), description="For cloud: ssh, the hosts that you have."
    )
    resources: Annotated[ResourcesKeys, BeforeValidator(_keys)] = Field(
        default=ResourcesKeys(), description="The machines wanted."
    )
    machine: Annotated[MachineKeys, BeforeValidator(_keys)] = Field(
        default=MachineKeys(), description="What machines are given beside the job's own software."
    )
    gate: kinds.Gate = Field(
        default=GatePolicy.FULL, description="How machines with GPUs are checked before an attempt: full or quick."
    )
    image: kinds.Line | None = Field(default=None, description="A container image in which the job runs.")
    container: Annotated[ContainerKeys, BeforeValidator(_keys)] = Field(
        default=ContainerKeys(), description="How the job's container image is run."
    )
    conda: kinds.Line | None = Field(
        default=None, description="A conda environment's file, relative to the code folder; made once per node."
    )
    code: kinds.Line = Field(default=".", description="The folder that is copied to the nodes, relative to this file.")
    setup: kinds.Text | None = Field(default=None, description="A command line that runs once per node before the job.")
    mirrors: Annotated[MirrorsKeys, BeforeValidator(_keys)] = Field(
        default=MirrorsKeys(), description="Where packages come from in place of the usual places."
    )
    launcher: kinds.LauncherName = Field(
        default=Launcher.AUTO,
        description="What starts the workers: torchrun, mpi, tensorflow, plain, or auto: torchrun for a script.",
    )
    store: kinds.Store | None = Field(
        default=None, description="Where state, logs and checkpoints are kept: s3://bucket/prefix or a folder."
    )
    checkpoint: Annotated[CheckpointKeys, BeforeValidator(_checkpoint)] = Field(
        default=CheckpointKeys(),
        description="When checkpoints are saved and how many stay; none: the script saves nothing, and that is meant.",
        json_schema_extra=_or_none,
    )
    model: Annotated[ModelKeys | None, BeforeValidator(_keys)] = Field(
        default=None, description="The model that is trained: what GPUs and time are sized by."
    )
    work: kinds.Span | None = Field(
        default=None, description="How long the job takes on its machines, interruptions and waiting left out."
    )
    deadline: kinds.Span | None = Field(
        default=None, description="The longest that the job may take, waiting included."
    )
    policy: kinds.Policy = Field(
        default=Policy.LEARNED,
        description="How a deadline is kept with `market: auto`: learned (auto), uniform, greedy or on_demand.",
    )
    idle: Annotated[IdleKeys | None, BeforeValidator(_keys)] = Field(
        default=None, description="Save and stop a job that leaves its GPUs idle."
    )
    hold: kinds.Hold | None = Field(
        default=None,
        description="How long a failed script's machines wait for the mended one, from 1min to 1h, or `none`.",
    )
    data: kinds.Data = Field(default_factory=dict, description="Data sets: where they are, and their folder on nodes.")
    outputs: kinds.Outputs = Field(
        default=(),
        description="Files and folders that are brought home when the job ends, from the machine of rank 0; and when "
        "that is interrupted, where its notice leaves the time. Without one, what was written there goes with it.",
    )
    metrics: kinds.Patterns = Field(
        default_factory=dict,
        description="Numbers in the script's output, by regular expressions with one group each: "
        "`step`, `total_steps`, `loss`, and others, which are shown.",
    )
    tags: kinds.Tags = Field(default_factory=dict, description="Tags for everything made in the cloud.")
    env: kinds.Env = Field(default_factory=dict, description="Environment variables of the script. Not for secrets.")
    secrets: kinds.Secrets = Field(
        default=(),
        description="Names of variables that are taken from the caller's environment and never written down.",
    )
