from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import CheckpointPolicy, Job, Market, Resources
from gpucloud.domain.launch import AttemptStart, CommandLine, Place, Script, launches, parse_run
from gpucloud.domain.node import Node, NodeState
from gpucloud.domain.offer import Pool

START = AttemptStart(number=3, port=29501, store_url="s3://b/p", checkpoints="jobs/digits/checkpoints")
WORKER = 'PATH="$0:$PATH"; export PATH; exec "$@" >>"$GPUCLOUD_ATTEMPT_DIR/rank-$RANK.log" 2>&1'


def place(i):
    node = Node(
        id=f"n{i}",
        pool=Pool(instance_type="g5.xlarge", zone="us-west-2a", market=Market.SPOT),
        state=NodeState.RUNNING,
        launched_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        address=f"54.0.0.{i}",
        port=22,
        user="ubuntu",
        private_address=f"10.0.0.{i}",
        interface=f"ens{i}",
    )
    home = f"/home/u{i}/.gpucloud"
    return Place(node=node, python=f"/py{i}/bin/python", package=f"{home}/lib/g.zip", code=f"{home}/code/c", root=home)


def job(run, **changes):
    source = Path("/w/gpucloud.yaml")
    return Job(name="digits", run=run, budget_usd=Decimal(20), source=source, code=source.parent, **changes)


def two(run="train.py --epochs 10", *, secrets=None, **changes):
    return launches(job(run, **changes), START, (place(1), place(2)), secrets or {})


def test_a_script_is_started_by_torchrun_once_a_gpu():
    _, second = two("train.py --epochs 10 --m 'a b'", resources=Resources(nodes=2, gpus=4))
    assert second.argv == (
        "/py2/bin/python", "-m", "torch.distributed.run",
        "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4",
        "--master-addr", "10.0.0.1", "--master-port", "29501", "--rdzv-conf", "timeout=300",
        "--max-restarts", "0", "--monitor-interval", "0.1", "--no-python", "--",
        "/bin/sh", "-c", WORKER, "/py2/bin",
        "/py2/bin/python", "-u", "train.py", "--epochs", "10", "--m", "a b",
    )  # fmt: skip
    assert (second.attempt, second.directory, second.address) == (3, "/home/u2/.gpucloud/code/c", "10.0.0.2")


def test_a_script_finds_its_node_its_store_and_its_package_in_the_environment():
    _, second = two(
        resources=Resources(nodes=2, gpus=4),
        env=(("LR", "0.1"), ("PYTHONPATH", "src")),
        checkpoint=CheckpointPolicy(every=timedelta(seconds=90), keep=5),
        secrets={"HF_TOKEN": "hf_x"},
    )
    assert dict(second.env) == {
        "GLOO_SOCKET_IFNAME": "ens2",
        "GPUCLOUD_ATTEMPT": "3",
        "GPUCLOUD_ATTEMPT_DIR": "/home/u2/.gpucloud/attempts/0003",
        "GPUCLOUD_CHECKPOINTS": "jobs/digits/checkpoints",
        "GPUCLOUD_CHECKPOINT_EVERY": "90",
        "GPUCLOUD_CHECKPOINT_KEEP": "5",
        "GPUCLOUD_JOB": "digits",
        "GPUCLOUD_RANKS": "4 5 6 7",
        "GPUCLOUD_STORE": "s3://b/p",
        "HF_TOKEN": "hf_x",
        "LR": "0.1",
        "NCCL_SOCKET_IFNAME": "ens2",
        "OMP_NUM_THREADS": "1",
        "PET_SHUTDOWN_TIMEOUT": "5",
        "PYTHONPATH": "/home/u2/.gpucloud/lib/g.zip:src",
        "PYTHONUNBUFFERED": "1",
    }
    assert "hf_x" not in str(second.argv)


def test_a_command_line_runs_once_a_node_with_the_rank_variables():
    first, second = two("python -m nanotrain 'two words'", env=(("OMP_NUM_THREADS", "8"),))
    assert first.argv == ("/bin/sh", "-c", WORKER, "/py1/bin", "python", "-m", "nanotrain", "two words")
    ranks = {name: dict(second.env)[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    assert ranks == {"RANK": "1", "LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "2"}
    assert (dict(second.env)["MASTER_ADDR"], dict(second.env)["MASTER_PORT"]) == ("10.0.0.1", "29501")
    assert dict(second.env)["OMP_NUM_THREADS"] == "8"
    assert "GPUCLOUD_RANKS" not in dict(second.env)


def test_a_job_cannot_take_the_place_of_what_the_agent_relies_on():
    first, _ = two(env=(("GPUCLOUD_ATTEMPT_DIR", "/etc"), ("GPUCLOUD_RANKS", "9")))
    assert dict(first.env)["GPUCLOUD_ATTEMPT_DIR"] == "/home/u1/.gpucloud/attempts/0003"
    assert dict(first.env)["GPUCLOUD_RANKS"] == "0"


@pytest.mark.parametrize(
    ("policy", "cadence"),
    [
        (CheckpointPolicy(), "auto"),
        (CheckpointPolicy(every=timedelta(minutes=5)), "300"),
        (CheckpointPolicy(every=timedelta(milliseconds=500)), "0.5"),
        (CheckpointPolicy(every=timedelta(days=30)), "2592000"),
        (CheckpointPolicy(every_steps=50), "steps:50"),
    ],
)
def test_the_cadence_is_auto_seconds_or_steps(policy, cadence):
    first, _ = two(checkpoint=policy)
    assert dict(first.env)["GPUCLOUD_CHECKPOINT_EVERY"] == cadence


@pytest.mark.parametrize(
    ("run", "form"),
    [
        ("train.py", Script(words=("train.py",))),
        ("src/train.py --name='$5 | more' \"it's\"", Script(words=("src/train.py", "--name=$5 | more", "it's"))),
        (r"train.py --glob \*.txt", Script(words=("train.py", "--glob", "*.txt"))),
        ('train.py "(a; b)"', Script(words=("train.py", "(a; b)"))),
        ("python train.py -x 1", CommandLine(words=("python", "train.py", "-x", "1"))),
        ("python train.py --lr $LR", CommandLine(words=("/bin/sh", "-c", "python train.py --lr $LR"))),
        ('echo "$HOME"', CommandLine(words=("/bin/sh", "-c", 'echo "$HOME"'))),
        ("cd src && python t.py", CommandLine(words=("/bin/sh", "-c", "cd src && python t.py"))),
        ("A=1 python t.py", CommandLine(words=("/bin/sh", "-c", "A=1 python t.py"))),
        ("ls *.py", CommandLine(words=("/bin/sh", "-c", "ls *.py"))),
    ],
)
def test_a_run_line_is_a_script_words_or_a_shell_line(run, form):
    assert parse_run(run) == form


@pytest.mark.parametrize("run", ["", "train.py 'open", "train.py --lr $LR", "train.py > log", "train.py *.txt"])
def test_a_run_line_that_would_not_do_what_it_says_is_refused_with_a_hint(run):
    with pytest.raises(UsageError) as caught:
        parse_run(run)
    assert caught.value.hint
