from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from gpucloud.agent.attempt.composing import compose
from gpucloud.domain.checkpoint.layouts import Additions, KeepOrder, Rule
from gpucloud.domain.codec import from_json
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import (
    AwsChoices,
    CheckpointDirectory,
    CheckpointPolicy,
    Cloud,
    ContainerRuntime,
    Job,
    Launcher,
    Layout,
    Market,
    OnNotice,
    Resources,
)
from gpucloud.domain.node.container import ContainerRun, Mount
from gpucloud.domain.node.hardware import gpu_defaults
from gpucloud.domain.node.hardware import threads as threads_of
from gpucloud.domain.node.launch import launches, recipe
from gpucloud.domain.node.member import (
    AttemptStart,
    CommandLine,
    Place,
    Script,
    attempt_secret,
    parse_run,
    workers_per_node,
)
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.usecases.checkpoint.comparing import two_jobs

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
        "/py2/bin/python", "-m", "gpucloud.probe.torchrun",
        "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4",
        "--master-addr", "10.0.0.1", "--master-port", "29501", "--rdzv-conf", "timeout=300",
        "--max-restarts", "0", "--monitor-interval", "0.1", "--no-python", "--",
        "/bin/sh", "-c", WORKER, "/py2/bin",
        "/py2/bin/python", "-u", "train.py", "--epochs", "10", "--m", "a b",
    )  # fmt: skip
    assert (second.attempt, second.directory, second.address) == (3, "/home/u2/.gpucloud/code/c", "10.0.0.2")


def test_behind_a_clouds_own_firewall_it_is_torchs_torchrun():
    for cloud in Cloud:
        _, second = two(cloud=cloud)
        guarded = cloud is not Cloud.LOCAL
        assert second.argv[2] == ("torch.distributed.run" if guarded else "gpucloud.probe.torchrun")


def test_the_keeper_of_a_scripts_own_directory_comes_before_the_launcher_on_every_node():
    kept = CheckpointDirectory(path="out", layout=Layout.HF, on_notice=OnNotice.SIGTERM, settle=timedelta(seconds=2))
    both = two(checkpoint=CheckpointPolicy(keep=5, directory=kept), resources=Resources(nodes=2, gpus=4))
    alone = two(resources=Resources(nodes=2, gpus=4))

    assert [one.argv for one in both] == [one.argv for one in alone]
    *words, order, end = both[1].wrapper
    home = "/home/u2/.gpucloud"
    assert (words, end) == (["/py2/bin/python", f"{home}/lib/g.zip", "keep", "--root", home, "--order"], "--")
    assert from_json(KeepOrder, order) == KeepOrder(
        code=f"{home}/code/c",
        directory=f"{home}/code/c/out",
        rule=Rule(layout=Layout.HF, ranks=4, nodes=2, node=1),
        on_notice=OnNotice.SIGTERM,
        settle=timedelta(seconds=2),
        store="s3://b/p",
        prefix="jobs/digits/checkpoints",
        attempt=3,
        keep=5,
        rank=1,
        folder=f"{home}/attempts/0003",
        first_rank=4,
    )
    assert dict(both[1].env)["GPUCLOUD_CHECKPOINT_DIRECTORY"] == "out"
    assert [dict(one.env)["PET_SHUTDOWN_TIMEOUT"] for one in (*both, *alone)] == ["110", "110", "5", "5"]
    assert [one.wrapper for one in alone] == [(), ()]


def resuming(run, **options):
    """What the keeper is to add to a launch of that line, and the launch."""
    added = {"resume_args": ("--resume", "{checkpoint}"), "resume_variables": (("FROM", "{checkpoint}"),)}
    kept = CheckpointPolicy(directory=CheckpointDirectory(path="out", **added))
    (first, _) = two(run, checkpoint=kept, **options)
    return from_json(KeepOrder, first.wrapper[-2]).additions, first


@pytest.mark.parametrize("run", ["train.py --epochs 10", "python train.py", "bash train.sh"])
def test_what_a_script_is_told_after_a_checkpoint_was_put_back_comes_behind_its_own_words(run):
    added, launch = resuming(run)
    assert added.after("out/ckpt.pt") == Additions(
        words=("--resume", "out/ckpt.pt"), variables=(("FROM", "out/ckpt.pt"),)
    )
    assert str(added) == "--resume {checkpoint} FROM={checkpoint}"
    assert launch.argv[-1] == run.split()[-1]
    assert "GPUCLOUD_RESUME_ARGS" not in dict(launch.env)


def test_on_a_line_that_a_shell_reads_it_is_a_variable_that_is_empty_at_the_beginning():
    added, launch = resuming("python train.py $GPUCLOUD_RESUME_ARGS | tee log")
    assert added.after("out/ckpt.pt") == Additions(
        variables=(("FROM", "out/ckpt.pt"), ("GPUCLOUD_RESUME_ARGS", "--resume out/ckpt.pt"))
    )
    assert dict(launch.env)["GPUCLOUD_RESUME_ARGS"] == ""


def test_a_container_is_handed_the_variables_that_its_keeper_may_set():
    _, launch = resuming("python3 train.py $GPUCLOUD_RESUME_ARGS", image="img")
    words = compose(launch, Path("/home/u1/.gpucloud/attempts/0003")).argv
    handed = {name for option, name in pairwise(words) if option == "--env"}
    assert {"FROM", "GPUCLOUD_RESUME_ARGS"} <= handed


def test_the_keeper_stays_outside_of_the_container():
    kept = CheckpointPolicy(directory=CheckpointDirectory(path="out"))
    (first, _) = two("python3 train.py", image="img", checkpoint=kept)
    composed = compose(first, Path("/home/u1/.gpucloud/attempts/0003"))
    assert composed.argv[: len(first.wrapper)] == first.wrapper
    assert composed.argv[len(first.wrapper)] == "docker"


def test_a_script_finds_its_node_its_store_and_its_package_in_the_environment():
    _, second = two(
        resources=Resources(nodes=2, gpus=4),
        env=(("LR", "0.1"), ("PYTHONPATH", "src")),
        checkpoint=CheckpointPolicy(every=timedelta(seconds=90), keep=5),
        secrets={"HF_TOKEN": "hf_x"},
    )
    assert dict(second.env) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": "ens2",
        "GPUCLOUD_ATTEMPT": "3",
        "GPUCLOUD_ATTEMPT_DIR": "/home/u2/.gpucloud/attempts/0003",
        "GPUCLOUD_CHECKPOINTS": "jobs/digits/checkpoints",
        "GPUCLOUD_CHECKPOINT_EVERY": "90",
        "GPUCLOUD_CHECKPOINT_KEEP": "5",
        "GPUCLOUD_JOB": "digits",
        "GPUCLOUD_RANKS": "4 5 6 7",
        "GPUCLOUD_RECIPE": '{"code": "c", "run": "train.py --epochs 10", "settings": "6363b86a9fe1"}',
        "GPUCLOUD_STORE": "s3://b/p",
        "HF_TOKEN": "hf_x",
        "LR": "0.1",
        "NCCL_SOCKET_IFNAME": "=ens2",
        "PET_SHUTDOWN_TIMEOUT": "5",
        "PYTHONPATH": "/home/u2/.gpucloud/lib/g.zip:src",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    assert "hf_x" not in str(second.argv)


def test_a_script_on_a_range_of_nodes_hears_on_how_many_ranks_it_may_train():
    ranged, fixed = (two(resources=Resources(nodes=4, least_nodes=least, gpus=8))[0] for least in (2, 0))
    assert dict(ranged.env)["GPUCLOUD_WORLDS"] == "16 24 32"
    assert "GPUCLOUD_WORLDS" not in dict(fixed.env)


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
        ("""train.py "it's; (a)" 'b"c;'""", Script(words=("train.py", "it's; (a)", 'b"c;'))),
        ("""train.py ''"'"'; touch owned'""", Script(words=("train.py", "'; touch owned"))),
        ("train.py\n", Script(words=("train.py",))),
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


@pytest.mark.parametrize(
    "run",
    ["", "train.py 'open", "train.py --lr $LR", "train.py > log", "train.py *.txt", 'train.py "$X"', r'train.py "\$5"'],
)
def test_a_run_line_that_would_not_do_what_it_says_is_refused_with_a_hint(run):
    with pytest.raises(UsageError) as caught:
        parse_run(run)
    assert caught.value.hint


def test_mpirun_gets_the_same_words_on_every_node_and_the_secret_by_environment_only():
    start = replace(START, secret="5ec4e7")
    wanted = job("train.py --lr 0.1", launcher=Launcher.MPI, resources=Resources(nodes=2, gpus=4))
    first, second = launches(wanted, start, (place(1), place(2)), {})
    assert second.argv[:13] == (
        "/py2/bin/python", "/home/u2/.gpucloud/lib/g.zip", "mpi",
        "--rank", "1", "--nodes", "2", "--slots", "4", "--head", "10.0.0.1", "--port", "29501",
    )  # fmt: skip
    assert second.argv[13:16] == ("--", "/bin/sh", "-c")
    assert second.argv[13:] == first.argv[13:]
    assert second.argv[-2:] == ("--lr", "0.1")
    env = dict(second.env)
    assert (env["GPUCLOUD_CODE"], env["GPUCLOUD_JOB_PYTHON"]) == ("/home/u2/.gpucloud/code/c", "/py2/bin/python")
    assert (env["GPUCLOUD_RANKS"], env["MASTER_ADDR"], env["GPUCLOUD_ATTEMPT_SECRET"]) == (
        "4 5 6 7", "10.0.0.1", "5ec4e7",
    )  # fmt: skip
    assert "5ec4e7" not in str(second.argv)
    assert second.hidden == ("GPUCLOUD_ATTEMPT_SECRET",)


def test_one_node_under_mpirun_needs_no_secret():
    start = replace(START, secret="5ec4e7")
    (only,) = launches(job("train.py", launcher=Launcher.MPI), start, (place(1),), {})
    assert "GPUCLOUD_ATTEMPT_SECRET" not in dict(only.env)


def test_tensorflow_is_told_the_workers_in_the_order_of_ranks_once_a_node():
    _, second = two(launcher=Launcher.TENSORFLOW, resources=Resources(nodes=2, gpus=4))
    assert second.argv == (
        "/bin/sh", "-c", WORKER, "/py2/bin", "/py2/bin/python", "-u", "train.py", "--epochs", "10",
    )  # fmt: skip
    assert json.loads(dict(second.env)["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:29501", "10.0.0.2:29501"]},
        "task": {"type": "worker", "index": 1},
    }
    assert (dict(second.env)["RANK"], dict(second.env)["WORLD_SIZE"]) == ("1", "2")


@pytest.mark.parametrize(
    ("run", "launcher", "workers"),
    [
        ("train.py", Launcher.AUTO, 4),
        ("train.py", Launcher.TORCHRUN, 4),
        ("train.py", Launcher.MPI, 4),
        ("./a.out", Launcher.MPI, 4),
        ("train.py", Launcher.PLAIN, 1),
        ("train.py", Launcher.TENSORFLOW, 1),
        ("./a.out", Launcher.AUTO, 1),
    ],
)
def test_a_node_has_a_rank_a_gpu_or_one_where_the_job_is_started_once(run, launcher, workers):
    assert workers_per_node(job(run, launcher=launcher, resources=Resources(gpus=4))) == workers


def test_torchrun_is_refused_for_a_command_line():
    with pytest.raises(UsageError, match="torchrun starts a Python script") as caught:
        two("./a.out", launcher=Launcher.TORCHRUN)
    assert caught.value.hint == "run: train.py, or launcher: plain"


@pytest.mark.parametrize(
    ("devices", "gpus", "visible"),
    [((), 2, None), (("0", "1"), 2, "0,1"), (("2", "3", "5"), 2, "2,3"), (("GPU-aa", "GPU-bb"), 1, "GPU-aa")],
)
def test_a_job_sees_the_devices_that_are_its_nodes_and_no_more_than_it_asked_for(devices, gpus, visible):
    here = place(1)
    here = replace(here, node=replace(here.node, devices=devices))
    (only,) = launches(job("train.py", resources=Resources(gpus=gpus)), START, (here,), {})
    assert dict(only.env).get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("run", "launcher", "gpus", "cloud", "sharing"),
    [
        ("train.py", Launcher.AUTO, 8, Cloud.AWS, 8),
        ("train.py", Launcher.TORCHRUN, 1, Cloud.AWS, 0),
        ("train.py", Launcher.MPI, 4, Cloud.SSH, 4),
        ("train.py", Launcher.MPI, 1, Cloud.SSH, 0),
        ("python train.py", Launcher.AUTO, 8, Cloud.AWS, 0),
        ("train.py", Launcher.PLAIN, 8, Cloud.AWS, 0),
        ("train.py", Launcher.TENSORFLOW, 8, Cloud.AWS, 0),
        ("train.py", Launcher.AUTO, 2, Cloud.LOCAL, 5),
        ("python train.py", Launcher.AUTO, 2, Cloud.LOCAL, 3),
    ],
)
def test_only_processes_that_share_a_nodes_cpus_are_held_to_a_part_of_them(run, launcher, gpus, cloud, sharing):
    resources = Resources(nodes=2, gpus=gpus)
    first, _ = two(run, launcher=launcher, cloud=cloud, resources=resources)
    assert first.sharing == sharing
    assert "OMP_NUM_THREADS" not in dict(first.env)


@pytest.mark.parametrize(("outputs", "told"), [((), False), (("results/",), True)])
def test_a_node_is_told_whether_what_its_script_writes_is_to_come_home(outputs, told):
    assert [launch.outputs for launch in two(outputs=outputs)] == [told, told]


def test_threads_are_the_cpus_of_a_process_and_never_none():
    assert threads_of(8, 192) == {"OMP_NUM_THREADS": "24"}
    assert threads_of(8, 2) == {"OMP_NUM_THREADS": "1"}
    assert threads_of(0, 192) == {}


@pytest.mark.parametrize(("of_the_node", "threads"), [(None, "1"), ("6", "6")])
def test_what_a_node_itself_says_of_threads_beats_what_is_proposed(monkeypatch, of_the_node, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_the_node:
        monkeypatch.setenv("OMP_NUM_THREADS", of_the_node)
    shared = replace(two()[0], sharing=10_000)
    assert {**os.environ, **compose(shared, Path("/a")).given}["OMP_NUM_THREADS"] == threads


def test_the_users_own_variables_win_over_what_we_propose():
    here = place(1)
    here = replace(here, node=replace(here.node, devices=("0", "1")))
    env = (("CUDA_VISIBLE_DEVICES", "1"), ("NCCL_SOCKET_IFNAME", "bond0"), ("PYTHONUNBUFFERED", ""))
    (only,) = launches(job("train.py", env=env), START, (here,), {})
    found = dict(only.env)
    assert (found["CUDA_VISIBLE_DEVICES"], found["NCCL_SOCKET_IFNAME"]) == ("1", "bond0")
    assert (found["GLOO_SOCKET_IFNAME"], found["PYTHONUNBUFFERED"]) == ("ens1", "")


def test_nccl_writes_to_the_attempts_folder_and_efa_is_named_only_where_it_is():
    plain = gpu_defaults("/a", efa=False)
    assert plain == {
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": "/a/nccl-%h-%p.log",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/nccl-trace-",
    }
    efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    assert gpu_defaults("/a", efa=True) == {**plain, **efa}


def test_an_image_runs_torchrun_by_its_own_python_with_code_attempt_package_and_data_mounted():
    here = replace(place(1), image="r/i@sha256:ab")
    wanted = job("train.py", image="r/i:1", data=(("s3://b/d", "/data"),))
    start = replace(START, store_url="file:///my%20store")
    (only,) = launches(wanted, start, (here,), {})
    assert only.argv[:3] == ("python3", "-m", "gpucloud.probe.torchrun")
    assert only.argv[-3:] == ("python3", "-u", "train.py")
    home = "/home/u1/.gpucloud"
    assert only.container == ContainerRun(
        name="gpucloud-digits-3-0",
        image="r/i@sha256:ab",
        runtime=ContainerRuntime.AUTO,
        devices=(),
        gpus=1,
        mounts=(
            Mount(path=f"{home}/code/c"),
            Mount(path=f"{home}/home"),
            Mount(path=f"{home}/attempts/0003"),
            Mount(path=f"{home}/lib/g.zip", read_only=True),
            Mount(path="/data"),
            Mount(path="/my store"),
        ),
        home=f"{home}/home",
    )


def test_a_profile_asks_for_nsys_around_each_rank_only_when_it_is_wanted():
    (plain,) = launches(job("train.py"), START, (place(1),), {})
    (profiled,) = launches(job("train.py"), replace(START, profile_steps=7), (place(1),), {})
    assert "nsys" not in str(plain.argv)
    assert "nsys profile" in str(profiled.argv)
    assert dict(profiled.env)["GPUCLOUD_PROFILE_STEPS"] == "7"
    assert profiled.argv[-3:] == ("/py1/bin/python", "-u", "train.py")


def test_the_secret_of_an_attempt_is_the_same_for_every_supervisor_and_another_for_every_attempt():
    assert attempt_secret(b"key", "digits", 3) == attempt_secret(b"key", "digits", 3)
    others = {attempt_secret(k, j, n) for k, j, n in [(b"key", "d", 3), (b"key", "d", 4), (b"k2", "d", 3)]}
    assert len(others) == 3


def test_a_profilers_own_start_and_stop_are_kept_out_of_the_ranks_output():
    assert "KINETO_LOG_LEVEL" not in dict(two()[1].env)
    profiled = launches(job("train.py"), replace(START, profile_steps=5), (place(1), place(2)), {})
    assert [dict(one.env)["KINETO_LOG_LEVEL"] for one in profiled] == ["6", "6"]


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "train.py --epochs 11"},
        {"setup": "pip install x"},
        {"env": (("LR", "0.1"),)},
        {"data": (("s3://bucket/v2", "/data"),)},
    ],
)
def test_a_script_is_made_of_all_that_reaches_it_from_the_job_file(changes):
    before = job("train.py --epochs 10", data=(("s3://bucket/v1", "/data"),))
    assert recipe(replace(before, **changes), "/c/tree") != recipe(before, "/c/tree")
    assert recipe(replace(before, budget_usd=Decimal(9)), "/c/tree") == recipe(before, "/c/tree")


def test_a_recipe_stays_as_it_is_when_keys_are_added_to_the_job_file():
    """What was saved with it before would be resumed best effort: change it in need alone, and say so in CHANGELOG."""
    beside = Job(
        name="digits",
        run="train.py",
        budget_usd=Decimal(1),
        source=Path("/c/gpucloud.yaml"),
        code=Path("/c"),
        resources=Resources(nodes=2),
        checkpoint=CheckpointPolicy(directory=CheckpointDirectory(path="out")),
        own_code_sha256="a" * 64,
    )
    assert json.loads(recipe(beside, "/c/tree"))["settings"] == "9cc60e6edd73"
    assert json.loads(recipe(replace(beside, own_code_sha256=""), "/c/tree"))["settings"] == "44136fa355b3"


def test_a_script_is_made_of_its_code_the_job_file_apart():
    """Trees that differ in the job file alone are one code; a job of before that was known goes by its tree."""
    before = job("train.py")
    known, edited = replace(before, own_code_sha256="a" * 64), replace(before, own_code_sha256="b" * 64)
    assert recipe(known, "/c/one") == recipe(known, "/c/two") != recipe(edited, "/c/one")
    assert recipe(before, "/c/one") != recipe(before, "/c/two")


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"budget_usd": Decimal(9), "deadline": timedelta(hours=9), "tags": (("a", "b"),)}, True),
        ({"metrics": (("lr", "0.1"),)}, False),
        ({"name": "other"}, False),
        ({"store": "s3://bucket/x", "secrets": ("TOKEN",), "aws": AwsChoices(profile="me")}, True),
    ],
)
def test_a_job_file_that_lies_in_the_code_may_be_read_by_its_script(changes, is_same):
    beside = replace(job("train.py"), own_code_sha256="a" * 64)
    assert (recipe(replace(beside, **changes), "/c/tree") == recipe(beside, "/c/tree")) is is_same
    elsewhere = "/c/" + "a" * 64  # the tree has no job file
    assert recipe(replace(beside, **changes), elsewhere) == recipe(beside, elsewhere)


def test_both_trials_of_a_job_whose_file_lies_in_the_code_are_made_of_the_same():
    """Their names differ, which a script cannot read there: it was said not to be deterministic."""
    beside = replace(job("train.py"), own_code_sha256="a" * 64)
    calm, killed = (recipe(one, "/c/tree") for one in two_jobs(beside, 6))
    assert calm == killed
