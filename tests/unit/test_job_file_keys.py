"""Every key of a job file arrives in the `Job`: each is set alone, to something else than its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from gpucloud.adapters.jobfile import read_job
from gpucloud.adapters.jobfile.model import JobKeys
from gpucloud.domain.job.spec import (
    Access,
    Cloud,
    ContainerRuntime,
    GatePolicy,
    Job,
    Launcher,
    Layout,
    MarketPolicy,
    OnNotice,
    Optimizer,
    OwnHost,
    Policy,
    Precision,
    Strategy,
)
from tests import handbook

READER = "gpucloud/adapters/jobfile/__init__.py"
MINUTES = timedelta(minutes=20)
ARN = "arn:aws:iam::123456789012:policy/boundary"
TOPIC = "arn:aws:sns:us-east-1:123456789012:money"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA"

# The key, what the file says, and all that changes in the Job by it.
KEYS: list[tuple[str, str, dict[str, object]]] = [
    ("name", "letters", {"name": "letters"}),
    ("run", "other.py", {"run": "other.py"}),
    ("budget", "3 USD", {"budget_usd": Decimal(3)}),
    ("cloud", "aws", {"cloud": Cloud.AWS}),
    ("aws.profile", "research", {"aws.profile": "research"}),
    ("aws.image", "ubuntu", {"aws.image": "ubuntu"}),
    ("aws.image_owners", "'123456789012'", {"aws.image_owners": ("123456789012",)}),
    ("aws.user", "admin", {"aws.user": "admin"}),
    ("aws.disk_gib", "200 GiB", {"aws.disk_gib": 200}),
    ("aws.access", "private", {"aws.access": Access.PRIVATE}),
    ("aws.subnets", "subnet-0a", {"aws.subnets": ("subnet-0a",)}),
    ("aws.instance_profile", "nodes", {"aws.instance_profile": "nodes"}),
    ("aws.permissions_boundary", ARN, {"aws.permissions_boundary": ARN}),
    ("aws.kms_key", "1234abcd-12ab-34cd-56ef-1234567890ab", {"aws.kms_key": "1234abcd-12ab-34cd-56ef-1234567890ab"}),
    ("aws.capacity_reservation", "cr-0a", {"aws.capacity_reservation": "cr-0a"}),
    ("aws.capacity_block", "cr-0b", {"aws.capacity_block": "cr-0b"}),
    ("aws.alert_email", "me@example.com", {"aws.alert_email": "me@example.com"}),
    ("aws.alert_topic", TOPIC, {"aws.alert_topic": TOPIC}),
    ("aws.alert_usd", "200 USD", {"aws.alert_usd": Decimal(200)}),
    ("ssh.hosts[].address", "b", {"ssh.hosts[0].address": "b"}),
    ("ssh.hosts[].user", "me", {"ssh.hosts[0].user": "me"}),
    ("ssh.hosts[].port", "2222", {"ssh.hosts[0].port": 2222}),
    ("ssh.hosts[].host_key", HOST_KEY, {"ssh.hosts[0].host_key": HOST_KEY}),
    ("ssh.hosts[].private_address", "10.0.0.5", {"ssh.hosts[0].private_address": "10.0.0.5"}),
    ("ssh.hosts[].interface", "eth1", {"ssh.hosts[0].interface": "eth1"}),
    ("ssh.hosts[].gpus", "[0, 1]", {"ssh.hosts[0].gpus": (0, 1)}),
    ("ssh.hosts[].jump", "me@gate:22", {"ssh.hosts[0].jump": "me@gate:22"}),
    ("ssh.key", "/id", {"ssh.key": Path("/id")}),
    ("ssh.price", "2 USD", {"ssh.usd_per_hour": Decimal(2)}),
    ("resources.nodes", "2-4", {"resources.nodes": 4, "resources.least_nodes": 2}),
    ("resources.gpus", "8", {"resources.gpus": 8}),
    ("resources.gpu", "A100", {"resources.gpu": ("A100",)}),
    ("resources.vram_gib", "40 GiB", {"resources.vram_gib": 40}),
    ("resources.market", "on_demand", {"resources.market": MarketPolicy.ON_DEMAND}),
    ("resources.regions", "us-west-2", {"resources.regions": ("us-west-2",)}),
    ("resources.types", "g5.12xlarge", {"resources.types": ("g5.12xlarge",)}),
    ("machine.driver", "580", {"machine.driver": "580"}),
    ("machine.mig", "3g.71gb", {"machine.mig": "3g.71gb"}),
    ("machine.mps", "true", {"machine.mps": True}),
    ("machine.exporter", "true", {"machine.exporter": True}),
    ("gate", "quick", {"gate": GatePolicy.QUICK}),
    ("image", "nvcr.io/nvidia/pytorch:26.08-py3", {"image": "nvcr.io/nvidia/pytorch:26.08-py3"}),
    ("container.runtime", "apptainer", {"container.runtime": ContainerRuntime.APPTAINER}),
    ("container.login", "LOGIN", {"container.login": "LOGIN"}),
    ("conda", "environment.yml", {"conda": "environment.yml"}),
    ("code", "src", {"code": Path("src")}),
    ("setup", "make", {"setup": "make"}),
    ("mirrors.apt", "https://a.example.com", {"mirrors.apt": "https://a.example.com"}),
    ("mirrors.pip", "https://p.example.com", {"mirrors.pip": "https://p.example.com"}),
    ("mirrors.torch", "https://t.example.com", {"mirrors.torch": "https://t.example.com"}),
    ("launcher", "plain", {"launcher": Launcher.PLAIN}),
    ("store", "s3://my-bucket/p", {"store": "s3://my-bucket/p"}),
    ("checkpoint.every", "100 steps", {"checkpoint.every_steps": 100}),
    ("checkpoint.every", "20 min", {"checkpoint.every": MINUTES}),
    ("checkpoint.keep", "5", {"checkpoint.keep": 5}),
    ("checkpoint.give_up", "never", {"checkpoint.give_up": None}),
    ("checkpoint.directory", "saved", {"checkpoint.directory.path": "saved"}),
    ("checkpoint.layout", "hf", {"checkpoint.directory.layout": Layout.HF}),
    ("checkpoint.done_file", "DONE", {"checkpoint.directory.done_file": "DONE"}),
    ("checkpoint.on_notice", "SIGTERM", {"checkpoint.directory.on_notice": OnNotice.SIGTERM}),
    ("checkpoint.per_node", "true", {"checkpoint.directory.per_node": True}),
    ("checkpoint.settle", "20 min", {"checkpoint.directory.settle": MINUTES}),
    ("checkpoint.resume_args", "--resume", {"checkpoint.directory.resume_args": ("--resume",)}),
    ("checkpoint.resume_variables", "{AGAIN: 1}", {"checkpoint.directory.resume_variables": (("AGAIN", "1"),)}),
    ("model.params", "8B", {"model.params": 8_000_000_000}),
    ("model.precision", "fp8", {"model.precision": Precision.FP8}),
    ("model.optimizer", "sgd", {"model.optimizer": Optimizer.SGD}),
    ("model.strategy", "fsdp", {"model.strategy": Strategy.FSDP}),
    ("model.tokens", "1B", {"model.tokens": 1_000_000_000}),
    ("model.mfu", "40%", {"model.mfu_percent": 40}),
    ("model.seq", "4096", {"model.seq": 4096}),
    ("model.batch", "2", {"model.batch": 2}),
    ("model.hidden", "512", {"model.hidden": 512}),
    ("model.layers", "32", {"model.layers": 32}),
    ("model.vocab", "32000", {"model.vocab": 32000}),
    ("model.recompute", "true", {"model.recompute": True, "model.mfu_percent": 26}),
    ("work", "20 min", {"work": MINUTES}),
    ("deadline", "20 min", {"deadline": MINUTES, "resources.market": MarketPolicy.AUTO}),
    ("policy", "uniform", {"policy": Policy.UNIFORM}),
    ("idle.below", "20%", {"idle.below": 20}),
    ("idle.for", "20 min", {"idle.lasting": MINUTES}),
    ("hold", "20 min", {"hold": MINUTES}),
    ("data", "{s3://my-bucket/set: /data}", {"data": (("s3://my-bucket/set", "/data"),)}),
    ("outputs", "results/", {"outputs": ("results/",)}),
    ("metrics", r"{step: 'iter (\d+)'}", {"metrics": (("step", r"iter (\d+)"),)}),
    ("tags", "{project: vision}", {"tags": (("project", "vision"),)}),
    ("env", "{RATE: 2}", {"env": (("RATE", "2"),)}),
    ("secrets", "HF_TOKEN", {"secrets": ("HF_TOKEN",)}),
]
# What a key needs beside it.
BESIDE = {
    "ssh.hosts": "ssh: {hosts: [{address: a}]}",
    "container.login": "secrets: [LOGIN]",
    "model": "model: {params: 7B}",
    "checkpoint.layout": "checkpoint: {directory: out}",
    "checkpoint.done_file": "checkpoint: {directory: out}",
    "checkpoint.directory": "checkpoint: {directory: out}",
    "checkpoint.on_notice": "checkpoint: {directory: out}",
    "checkpoint.per_node": "checkpoint: {directory: out, layout: dcp}",
    "checkpoint.settle": "checkpoint: {directory: out}",
    "checkpoint.resume": "checkpoint: {directory: out}",
    "policy": "deadline: 1h",
    "idle": "idle: {below: 30%, for: 1h}",
    **{f"model.{key}": "model: {params: 7B, seq: 128}" for key in ("batch", "hidden", "layers", "vocab", "recompute")},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for name in ("train.py", "other.py", "environment.yml", "src/train.py"):
        (tmp_path / name).touch()
    return tmp_path


def test_every_key_of_the_model_is_tried_here() -> None:
    known = re.findall(r"^\| `([a-z_.\[\]]+)` \|", handbook.keys(), re.MULTILINE)
    sections = {key.rpartition(".")[0].removesuffix("[]") for key in known}
    lacking = [key for key in known if key not in sections | {key for key, _, _ in KEYS}]
    assert lacking == [], f"add a row to KEYS in {Path(__file__).name} for {', '.join(lacking)}"


@pytest.mark.parametrize(("key", "value", "changes"), KEYS, ids=[f"{key}={value}" for key, value, _ in KEYS])
def test_a_key_changes_what_it_says_in_the_job_and_nothing_else(
    folder: Path, key: str, value: str, changes: dict[str, object]
) -> None:
    beside = next((text for name, text in sorted(BESIDE.items(), reverse=True) if key.startswith(name)), "")
    keys = yaml.safe_load(f"name: digits\nrun: train.py\nbudget: 2 USD\n{beside}\n")
    before = values_of(read(folder, keys))

    after = values_of(read(folder, with_key(keys, key, yaml.safe_load(value))))

    changed = {name: told for name, told in after.items() if before.get(name, ...) != told}
    assert changed, f"`{key}: {value}` changes nothing in the Job: pass the key on in {READER}"
    assert changed == {name: folder / told if isinstance(told, Path) else told for name, told in changes.items()}


def test_a_clouds_section_is_a_key_of_the_job_file_and_a_field_of_the_job() -> None:
    sections = [cloud.traits.section for cloud in Cloud if cloud.traits.section is not None]
    assert sections == ["aws", "ssh"], (
        "for a new cloud's section, add it to this list; it is a key of JobKeys and a field of Job with the same name"
    )
    assert set(sections) <= JobKeys.model_fields.keys() & {one.name for one in fields(Job)}


def test_the_files_of_this_machine_that_a_job_names_are_known() -> None:
    found = [path for path, kind in kinds_below("", Job) if kind is Path]
    assert found == ["source", "code", "ssh.key"], (
        "in another's order a new path means a file here: have OrderedJob._as_meant_here leave it out,"
        " then add it to this list"
    )


def test_the_machines_that_a_job_names_are_all_given_by_its_clouds() -> None:
    found = [path for path, kind in kinds_below("", Job) if kind is OwnHost]
    assert found == ["ssh.hosts"], (
        "have Job.hosts_on give the new ones, for order.unusable judges what it gives; then add them to this list"
    )


def read(folder: Path, keys: object) -> Job:
    (folder / "job.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return read_job(folder / "job.yaml")


def with_key(keys: dict[str, object], key: str, value: object) -> object:
    """Return the file's keys with one more, whose name is as in the handbook's table."""
    at, *below = key.split(".")
    if not below:
        return {**keys, at: value}
    rest = ".".join(below)
    if at.endswith("[]"):
        return {**keys, at[:-2]: [with_key({"address": "a"}, rest, value)]}
    section = keys.get(at, {})
    assert isinstance(section, dict)
    return {**keys, at: with_key(section, rest, value)}


def values_of(job: Job) -> dict[str, object]:
    """Return every value of a job by its path, as `resources.nodes` or `ssh.hosts[0].port`."""
    return dict(_values("", job))


def _values(path: str, value: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _values(f"{path}.{one.name}".lstrip("."), getattr(value, one.name))
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for at, one in enumerate(value):
            yield from _values(f"{path}[{at}]", one)
    else:
        yield path, value


def kinds_below(path: str, shape: type) -> Iterator[tuple[str, object]]:
    """Yield each field of a dataclass and of those below it, by its path, with every type that its values may have."""
    for name, hint in get_type_hints(shape).items():
        at = f"{path}.{name}".lstrip(".")
        for kind in (hint, *get_args(hint)):
            yield at, kind
            if is_dataclass(kind) and isinstance(kind, type) and kind is not OwnHost:
                yield from kinds_below(at, kind)
