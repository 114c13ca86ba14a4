"""A job file becomes a Job; the sample documents every key and agrees with the schema."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucloud.adapters.home import bundled
from gpucloud.adapters.jobfile import json_schema, read_job, sample_job, spec_sha256
from gpucloud.adapters.jobfile.model import CheckpointKeys, JobKeys, ModelKeys, ResourcesKeys
from gpucloud.domain.errors import JobFileError, Problem, UsageError
from gpucloud.domain.job.spec import (
    CheckpointDirectory,
    CheckpointPolicy,
    Cloud,
    GatePolicy,
    IdlePolicy,
    Job,
    Launcher,
    Layout,
    MachineChoices,
    MarketPolicy,
    Mirrors,
    Model,
    OnNotice,
    Optimizer,
    OwnHost,
    Policy,
    Precision,
    Resources,
    SshChoices,
    Strategy,
)
from gpucloud.usecases.jobstore.runs import keys_that_differ

SAMPLE = bundled("templates", "gpucloud.yaml").read_text(encoding="utf-8")
# A "#" with no space after it hides a key that the reader of the sample may want.
FULL_SAMPLE = re.sub(r"(?m)^(\s*)#(?=[a-z])", r"\1", SAMPLE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "environment.yml").touch()
    return tmp_path


def read(folder: Path, text: str) -> Job:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return read_job(folder / "job.yaml")


def test_the_least_job_takes_every_default_from_the_domain(folder: Path) -> None:
    job = read(folder, "name: digits\nrun: train.py\nbudget: 20 USD\n")
    assert job == Job(name="digits", run="train.py", budget_usd=Decimal(20), source=folder / "job.yaml", code=folder)


@pytest.mark.parametrize(
    ("written", "nodes", "least_nodes"), [("4", 4, 0), ("2-4", 4, 2), ("'2-4'", 4, 2), ("1 - 64", 64, 1)]
)
def test_nodes_are_a_number_or_a_range_of_them(folder: Path, written: str, nodes: int, least_nodes: int) -> None:
    job = read(folder, f"name: a\nrun: python x\nresources: {{nodes: {written}}}\nbudget: 1 USD\n")
    assert (job.resources.nodes, job.resources.least_nodes) == (nodes, least_nodes)
    assert (
        list(violations({"nodes": yaml.safe_load(written)}, json_schema()["$defs"]["ResourcesKeys"], json_schema()))
        == []
    )


def test_every_key_reaches_the_job(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "train.py").touch()
    (folder / "set").mkdir()
    job = read(
        folder,
        """
name: digits
cloud: ssh
ssh: {hosts: [a, b, c, d]}
resources: {nodes: 4, gpus: 8, gpu: [A100, RTX 4090], vram_gib: 40, market: on_demand, regions: us-west-2}
code: src
setup: |
  pip install -r requirements.txt
  echo "it's ready"
run: train.py --lr 0.1
store: results/store
checkpoint: {every: 100 steps, keep: 5}
budget: $0.5
deadline: 1h 30m
data: {s3://bucket/imagenet/: /data, set: /set}
outputs: results/
tags: {project: vision, cost: 007}
env: {OMP_NUM_THREADS: 1, RATE: 1.10, EMPTY: "", WHEN: 2024-01-01, HOME_DIR: "${HOME}", AT: 12:30:00}
secrets: [HF_TOKEN, WANDB_API_KEY]
""",
    )
    assert job == Job(
        name="digits",
        cloud=Cloud.SSH,
        ssh=SshChoices(hosts=tuple(OwnHost(address=name) for name in "abcd")),
        resources=Resources(
            nodes=4,
            gpus=8,
            gpu=("A100", "RTX 4090"),
            vram_gib=40,
            market=MarketPolicy.ON_DEMAND,
            regions=("us-west-2",),
        ),
        source=folder / "job.yaml",
        code=folder / "src",
        setup='pip install -r requirements.txt\necho "it\'s ready"\n',
        run="train.py --lr 0.1",
        store=str(folder / "results/store"),
        checkpoint=CheckpointPolicy(every_steps=100, keep=5),
        budget_usd=Decimal("0.5"),
        deadline=timedelta(minutes=90),
        data=(("s3://bucket/imagenet", "/data"), (str(folder / "set"), "/set")),
        outputs=("results/",),
        tags=(("project", "vision"), ("cost", "007")),
        env=(
            ("OMP_NUM_THREADS", "1"),
            ("RATE", "1.10"),
            ("EMPTY", ""),
            ("WHEN", "2024-01-01"),
            ("HOME_DIR", "${HOME}"),
            ("AT", "12:30:00"),
        ),
        secrets=("HF_TOKEN", "WANDB_API_KEY"),
    )


@pytest.mark.parametrize(
    ("line", "attribute", "value"),
    [
        ("checkpoint: {every: auto}", "checkpoint", CheckpointPolicy()),
        ("checkpoint: {every: 10 min}", "checkpoint", CheckpointPolicy(every=timedelta(minutes=10))),
        ("checkpoint: {every: 1 step}", "checkpoint", CheckpointPolicy(every_steps=1)),
        ("checkpoint: {directory: out}", "checkpoint", CheckpointPolicy(directory=CheckpointDirectory(path="out"))),
        ("checkpoint: {directory: ./}", "checkpoint", CheckpointPolicy(directory=CheckpointDirectory(path="."))),
        (
            "checkpoint: {directory: out/run/, layout: hf, on_notice: SIGUSR1, settle: 5s}",
            "checkpoint",
            CheckpointPolicy(
                directory=CheckpointDirectory(
                    path="out/run", layout=Layout.HF, on_notice=OnNotice.SIGUSR1, settle=timedelta(seconds=5)
                )
            ),
        ),
        (
            "checkpoint: {directory: out, done_file: DONE}",
            "checkpoint",
            CheckpointPolicy(directory=CheckpointDirectory(path="out", done_file="DONE")),
        ),
        (
            "checkpoint: {directory: out, layout: dcp, per_node: true}",
            "checkpoint",
            CheckpointPolicy(directory=CheckpointDirectory(path="out", layout=Layout.DCP, per_node=True)),
        ),
        (
            "checkpoint: {directory: out, resume_args: \"--resume 'a b' {checkpoint}\", resume_variables: {N: 1}}",
            "checkpoint",
            CheckpointPolicy(
                directory=CheckpointDirectory(
                    path="out", resume_args=("--resume", "a b", "{checkpoint}"), resume_variables=(("N", "1"),)
                )
            ),
        ),
        (
            'checkpoint: {directory: out, resume_args: [--resume, "a b", 1]}',
            "checkpoint",
            CheckpointPolicy(directory=CheckpointDirectory(path="out", resume_args=("--resume", "a b", "1"))),
        ),
        (
            r"metrics: {step: 'iter (\d+)', loss: 'loss ([0-9.]+)'}",
            "metrics",
            (("step", r"iter (\d+)"), ("loss", "loss ([0-9.]+)")),
        ),
        ("checkpoint: {give_up: 7.5x}", "checkpoint", CheckpointPolicy(give_up=7.5)),
        ("checkpoint: {give_up: never}", "checkpoint", CheckpointPolicy(give_up=None)),
        ("checkpoint: {every: 9 steps, give_up: 10 x}", "checkpoint", CheckpointPolicy(every_steps=9, give_up=10.0)),
        ("resources: {vram_gib: 80 GiB}", "resources", Resources(vram_gib=80)),
        ("resources: {gpu: 4090}", "resources", Resources(gpu=("4090",))),
        ("store: s3://bucket/a/b/", "store", "s3://bucket/a/b"),
        ("store: file:///var/store", "store", "/var/store"),
        ("store: /var/../store", "store", "/store"),
        ("deadline: 2d 3h", "deadline", timedelta(hours=51)),
        ("work: 48h", "work", timedelta(hours=48)),
        ("deadline: 9h\npolicy: auto", "policy", Policy.LEARNED),
        ("deadline: 9h\npolicy: greedy", "policy", Policy.GREEDY),
        ("deadline: 9h", "resources", Resources(market=MarketPolicy.AUTO)),
        ("deadline: 9h\nresources: {market: spot}", "resources", Resources(market=MarketPolicy.SPOT)),
        ("model: {params: 7B}", "model", Model(params=7_000_000_000)),
        (
            "model: {params: 7B, seq: 2048, recompute: true}",
            "model",
            Model(params=7 * 10**9, seq=2048, recompute=True, mfu_percent=26),
        ),
        (
            "model: {params: 7B, seq: 2048, recompute: true, mfu: 35%}",
            "model",
            Model(params=7 * 10**9, seq=2048, recompute=True, mfu_percent=35),
        ),
        ("model: {params: 1.5e9, mfu: 40%}", "model", Model(params=1_500_000_000, mfu_percent=40)),
        (
            "model: {params: 350 M, precision: fp8, optimizer: adam8bit, strategy: fsdp, tokens: 300B}",
            "model",
            Model(
                params=350_000_000,
                precision=Precision.FP8,
                optimizer=Optimizer.ADAM8BIT,
                strategy=Strategy.FSDP,
                tokens=300_000_000_000,
            ),
        ),
        (
            "model: {params: 7B, mfu: 35%, seq: 4096, batch: 2, hidden: 4096, layers: 32, vocab: 32k, recompute: true}",
            "model",
            Model(params=7_000_000_000, seq=4096, batch=2, hidden=4096, layers=32, vocab=32_000, recompute=True),
        ),
        ("env: {NO: y}", "env", (("NO", "y"),)),
    ],
)
def test_a_value_is_read_as_people_write_it(folder: Path, line: str, attribute: str, value: object) -> None:
    assert getattr(read(folder, f"name: a\nrun: train.py\nbudget: 1 USD\n{line}\n"), attribute) == value


@pytest.mark.parametrize("run", ["python -m trainer --lr 1", "bash -c 'a; b'", "echo x > y.py", "|\n  it's fine\n  b"])
def test_a_command_line_needs_no_script(folder: Path, run: str) -> None:
    text = f"name: a\nrun: {run}\nbudget: 1 USD\n"
    assert read(folder, text).run.splitlines()[0] == run.removeprefix("|\n  ").splitlines()[0]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder: Path) -> None:
    (folder / "job.yaml").write_bytes(b"\xef\xbb\xbfname: a\r\nrun: train.py\r\nbudget: 1 USD\r\n")
    assert read_job(folder / "job.yaml").name == "a"


def test_the_home_folder_may_be_written_as_a_tilde(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert read(folder, "name: a\nrun: train.py\nbudget: 1 USD\nstore: ~/store\n").store == str(folder / "store")


def test_the_spec_hash_is_that_of_the_files_bytes(folder: Path) -> None:
    (folder / "job.yaml").write_bytes(b"abc")
    assert spec_sha256(folder / "job.yaml") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_sample_reads_as_it_is_written(folder: Path) -> None:
    job = read(folder, sample_job("my-job"))
    assert (job.name, job.cloud, job.resources.nodes, job.code) == ("my-job", Cloud.LOCAL, 1, folder)


@pytest.mark.parametrize("without", [("image", "  subnets"), ("conda", "setup", "  alert_email", "  alert_topic")])
def test_the_sample_with_every_key_reads_too(folder: Path, without: tuple[str, ...]) -> None:
    """An image holds the whole software, so that it excludes what would make it; own subnets come with no alarm."""
    lines = [text for text in FULL_SAMPLE.splitlines() if not text.startswith(tuple(f"{key}:" for key in without))]
    job = read(folder, "\n".join(lines))
    assert job.secrets == ("HF_TOKEN", "REGISTRY_LOGIN")
    assert job.data == (("s3://my-bucket/imagenet", "/data"),)


def test_the_sample_documents_exactly_the_keys_that_there_are() -> None:
    sample = yaml.safe_load(FULL_SAMPLE)
    assert set(sample) == set(JobKeys.model_fields)
    assert set(sample["resources"]) == set(ResourcesKeys.model_fields)
    assert set(sample["checkpoint"]) == set(CheckpointKeys.model_fields)
    assert set(sample["model"]) == set(ModelKeys.model_fields)


def test_every_key_of_the_sample_has_a_comment_above_it() -> None:
    lines = SAMPLE.splitlines()
    keys = [at for at, line in enumerate(lines) if re.match(r"\s*#?[a-z_]+:", line)]
    bare = [lines[at] for at in keys if not lines[at - 1].lstrip().startswith("# ") and not lines[at].endswith(":")]
    assert bare == []


@pytest.mark.parametrize("name", ["My Job", "", "a" * 41, "a: b", "-"])
def test_a_sample_is_not_written_under_a_name_that_cannot_be_read(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        sample_job(name)
    assert caught.value.hint


def test_what_is_told_of_a_changed_file_are_its_keys() -> None:
    """Each key changes what it is read into; of the code folder that is where it lies from the file."""
    job = Job(name="a", run="a.py", budget_usd=Decimal(1), source=Path("/a/a.yaml"), code=Path("/a"))
    assert keys_that_differ(job, job) == ()
    places = {"source": Path("/b/b.yaml"), "code": Path("/b/src")}
    others = replace(job, **{one.name: places.get(one.name, object()) for one in fields(Job)})
    assert set(keys_that_differ(job, others)) == set(JobKeys.model_fields)
    assert keys_that_differ(job, replace(job, source=Path("/b/a.yaml"), code=Path("/b"))) == ()


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    models = {"CheckpointKeys": CheckpointKeys, "ResourcesKeys": ResourcesKeys}
    assert set(schema["properties"]) == set(JobKeys.model_fields)
    for name, model in models.items():
        assert set(schema["$defs"][name]["properties"]) == set(model.model_fields)
    shapes = [schema, *schema["$defs"].values()]
    described = [
        shape | schema["$defs"].get(shape.get("$ref", "").rpartition("/")[2], {})
        for s in shapes
        for shape in s["properties"].values()
    ]
    assert [shape for shape in described if not shape.get("description")] == []


def test_the_schema_accepts_the_sample_with_every_key() -> None:
    schema = json_schema()
    assert list(violations(yaml.safe_load(FULL_SAMPLE), schema, schema)) == []
    assert list(violations(yaml.safe_load(SAMPLE), schema, schema)) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"bugdet": "1 USD"}, "bugdet"),
        ({"budget": "20"}, "budget"),
        ({"budget": 20}, "budget"),
        ({"name": "My Job"}, "name"),
        ({"resources": {"nodes": 0}}, "resources.nodes"),
        ({"resources": {"nodes": "x-3"}}, "resources.nodes"),
        ({"resources": {"market": "sopt"}}, "resources.market"),
        ({"resources": {"gpu": [1]}}, "resources.gpu"),
        ({"checkpoint": {"keep": 1}}, "checkpoint"),
        ({"checkpoint": {"every": "often"}}, "checkpoint"),
        ({"env": {"1A": "x"}}, "env.1A"),
        ({"secrets": ["hf"]}, "secrets"),
        ({"data": {"s3://bucket": "data"}}, "data.s3://bucket"),
        ({"store": None}, "store"),
        ({"model": {}}, "model.params"),
        ({"model": {"params": "7 billion"}}, "model.params"),
        ({"model": {"params": 0}}, "model.params"),
        ({"model": {"params": 7, "strategy": "zero3"}}, "model.strategy"),
        ({"work": "48"}, "work"),
        ({"aws": {"kms_key": "alias/mine"}}, "aws.kms_key"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(change: dict[str, Any], where: str) -> None:
    schema = json_schema()
    assert list(violations({"name": "a", "run": "x", "budget": "1 USD", **change}, schema, schema)) == [where]


def test_the_schema_demands_what_is_required() -> None:
    schema = json_schema()
    assert list(violations({}, schema, schema)) == ["name", "run", "budget"]


TYPES: dict[str, Any] = {
    "boolean": bool,
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
}


def violations(value: Any, shape: dict[str, Any], root: dict[str, Any], path: str = "") -> Any:
    """Yield the path of everything that JSON Schema would refuse; only the words that our schema uses."""
    known = {"type", "enum", "minLength", "minimum", "maximum", "pattern", "anyOf", "$ref", "items", "uniqueItems"}
    known |= {"properties", "required", "additionalProperties", "propertyNames"}
    notes = {"description", "default", "examples", "title", "$schema", "$defs"}
    assert set(shape) <= known | notes, f"{path}: a word that this checker does not know"
    if "$ref" in shape:
        shape = root["$defs"][shape["$ref"].rpartition("/")[2]] | {k: v for k, v in shape.items() if k != "$ref"}
    if not _fits(value, shape, root):
        yield path
    elif isinstance(value, dict):
        yield from _inside(value, shape, root, path)


def _fits(value: Any, shape: dict[str, Any], root: dict[str, Any]) -> bool:
    types = shape.get("type", [])
    allowed = tuple(TYPES[name] for name in ([types] if isinstance(types, str) else types))
    if "anyOf" in shape and not any(not list(violations(value, one, root)) for one in shape["anyOf"]):
        return False
    if types and not any(isinstance(value, one) for one in allowed):
        return False
    if isinstance(value, str) and not (
        re.search(shape.get("pattern", ""), value) and len(value) >= shape.get("minLength", 0)
    ):
        return False
    if isinstance(value, int) and not shape.get("minimum", value) <= value <= shape.get("maximum", value):
        return False
    if isinstance(value, list) and any(list(violations(one, shape.get("items", {}), root)) for one in value):
        return False
    return value in shape.get("enum", [value])


def _inside(value: dict[str, Any], shape: dict[str, Any], root: dict[str, Any], path: str) -> Any:
    yield from (f"{path}.{key}".lstrip(".") for key in shape.get("required", []) if key not in value)
    for key, item in value.items():
        place = f"{path}.{key}".lstrip(".")
        more = shape.get("additionalProperties", {})
        if not re.search(shape.get("propertyNames", {}).get("pattern", ""), key):
            yield place
        elif key in shape.get("properties", {}):
            yield from violations(item, shape["properties"][key], root, place)
        elif more is False:
            yield place
        else:
            yield from violations(item, more, root, place)


PIECES = (
    *"\n\t :-[]{}#&*!|>'\"%@`,?~\0\x1b\ufeff\u2028é😀",
    *("\n  ", "no", "null", "\\U00110000", '"\\ud800"', "<<: ", "&a ", "*a", "!!python/name:os", "---\n", "...\n"),
    *("? ", "%YAML 1.1\n", "- ", "9" * 5000, "../", "/", "s3://", "\r", "[" * 20, "? " * 20, "- " * 20),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_sample_brings_a_job_or_problems_with_their_places(folder: Path, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([SAMPLE, FULL_SAMPLE]))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.one_of(st.just(start), st.integers(start, min(len(text), start + 30))))
        text = text[:start] + data.draw(st.one_of(st.sampled_from(PIECES), st.text(max_size=5))) + text[end:]
    (folder / "job.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    _job_or_problems(folder / "job.yaml")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes_bring_a_job_or_problems(folder: Path, data: bytes) -> None:
    (folder / "job.yaml").write_bytes(data)
    _job_or_problems(folder / "job.yaml")


ANY_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(sorted(JobKeys.model_fields)), ANY_VALUE, max_size=6))
def test_any_values_bring_a_job_or_problems(folder: Path, values: dict[str, Any]) -> None:
    sound = {"name": "a", "run": "train.py", "budget": "1 USD"}
    (folder / "job.yaml").write_text(yaml.safe_dump(sound | values), encoding="utf-8")
    _job_or_problems(folder / "job.yaml")


def _job_or_problems(path: Path) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        job = read_job(path)
    except JobFileError as error:
        problems = error.problems
    else:
        assert job.budget_usd > 0
        assert job.code.is_absolute()
        return
    assert problems
    assert all(problem.line >= 1 and problem.column >= 1 for problem in problems)
    assert [
        str(problem) for problem in problems if not problem.message.isprintable() or "ydantic" in str(problem)
    ] == []


def test_hosts_may_be_written_in_one_word_or_as_a_mapping(folder: Path) -> None:
    (folder / "id").touch()
    job = read(
        folder,
        "name: a\nrun: train.py\nbudget: 1 USD\ncloud: ssh\n"
        "ssh:\n  hosts: [me@gpu1.lab:2222, gpu2.lab, {address: 10.0.0.3, gpus: [0, 1]}]\n  key: id\n  price: $2\n",
    )
    assert job.ssh.hosts == (
        OwnHost(address="gpu1.lab", user="me", port=2222),
        OwnHost(address="gpu2.lab"),
        OwnHost(address="10.0.0.3", gpus=(0, 1)),
    )
    assert (job.ssh.key, job.ssh.usd_per_hour) == (folder / "id", Decimal(2))


def test_what_machines_are_given_reaches_the_job(folder: Path) -> None:
    job = read(
        folder,
        "name: a\nrun: train.py\nbudget: 1 USD\nmachine: {driver: 580, mps: true, mig: 3g.71gb}\n"
        "idle: {below: 30%, for: 15m}\ngate: quick\nlauncher: mpi\nmirrors: {pip: 'https://mirror.example.com/simple/'}\n",
    )
    assert job.machine == MachineChoices(driver="580", mps=True, mig="3g.71gb")
    assert job.idle == IdlePolicy(below=30, lasting=timedelta(minutes=15))
    assert (job.gate, job.launcher) == (GatePolicy.QUICK, Launcher.MPI)
    assert job.mirrors == Mirrors(pip="https://mirror.example.com/simple")


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("", "3:8: cloud: needs hosts: ssh: {hosts: [user@address]}"),
        ("ssh: {hosts: gpu1}\n", "4:20: resources.nodes: 2 nodes need as many hosts; there are 1"),
        (
            "ssh: {hosts: [a, b:2222, {address: b, port: 2222}]}\n",
            '5:26: ssh.hosts[2]: "b" is there twice: give each its own `gpus`',
        ),
        (
            "ssh: {hosts: [{address: a, gpus: [0, 1]}, {address: a, gpus: 1}]}\n",
            '5:43: ssh.hosts[1]: "a" is there twice: give each its own `gpus`',
        ),
        ("ssh: {hosts: [a, b], key: nothing}\n", '5:27: ssh.key: there is no file "nothing"'),
    ],
)
def test_hosts_that_cannot_serve_are_told_at_their_place(folder: Path, hosts: str, problem: str) -> None:
    with pytest.raises(JobFileError) as error:
        read(folder, f"name: a\nrun: train.py\ncloud: ssh\nresources: {{nodes: 2}}\n{hosts}budget: 1 USD\n")
    (found,) = error.value.problems
    assert str(found).split("job.yaml:")[1] == problem


def test_one_machine_may_be_two_hosts_with_gpus_of_their_own(folder: Path) -> None:
    hosts = "[{address: a, gpus: [0, 1]}, {address: a, gpus: [2, 3]}]"
    job = read(folder, f"name: a\nrun: train.py\nbudget: 1 USD\ncloud: ssh\nssh: {{hosts: {hosts}}}\n")
    assert [host.gpus for host in job.ssh.hosts] == [(0, 1), (2, 3)]
