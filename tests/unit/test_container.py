from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.agent.attempt.composing import compose, registry_of
from gpucloud.domain.job.spec import ContainerRuntime
from gpucloud.domain.node.container import ContainerRun, Inside, Mount, Passed, container_argv, end_argv
from gpucloud.domain.node.status import Launch

RUN = ContainerRun(
    name="gpucloud-digits-3-0",
    image="r/i@sha256:ab",
    runtime=ContainerRuntime.AUTO,
    devices=(),
    gpus=2,
    mounts=(Mount(path="/h/code"), Mount(path="/h/g.zip", read_only=True)),
)
CPU = Inside(runtime=ContainerRuntime.DOCKER, nvidia=False, fabric=(), user=1000, group=1001, login="ada")


def argv(run, inside):
    return container_argv(
        run,
        inside,
        folder="/h/attempts/0003",
        directory="/h/code",
        passed=Passed(names=("A", "HF_TOKEN"), values=(("HOME", "/h/home"),)),
        argv=("python3", "t.py"),
    )


def test_docker_shares_the_hosts_network_and_user_and_takes_variables_by_name_only():
    assert argv(RUN, CPU) == (
        "docker", "run", "--rm", "--pull", "never",
        "--name", "gpucloud-digits-3-0", "--label", "gpucloud.attempt=/h/attempts/0003",
        "--network", "host", "--ipc", "host", "--user", "1000:1001",
        "--volume", "/h/code:/h/code", "--volume", "/h/g.zip:/h/g.zip:ro",
        "--workdir", "/h/code", "--env", "A", "--env", "HF_TOKEN", "--env", "HOME=/h/home",
        "--entrypoint", "python3", "r/i@sha256:ab", "t.py",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "asked"),
    [((), '"device=0,1"'), (("2", "3"), '"device=2,3"'), (("GPU-aa",), '"device=GPU-aa"')],
)
def test_docker_is_handed_exactly_the_jobs_gpus_with_room_for_pinned_memory(devices, asked):
    run = ContainerRun(name=RUN.name, image=RUN.image, runtime=RUN.runtime, devices=devices, gpus=2, mounts=RUN.mounts)
    gpus = Inside(
        runtime=ContainerRuntime.DOCKER, nvidia=True, fabric=("/dev/infiniband/uverbs0",), user=0, group=0, login="root"
    )
    words = argv(run, gpus)
    at = words.index("--gpus")
    assert words[at : at + 8] == (
        "--gpus", asked, "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--device", "/dev/infiniband/uverbs0",
    )  # fmt: skip


def test_apptainer_runs_its_command_as_a_child_with_the_environment_as_it_is():
    inside = Inside(runtime=ContainerRuntime.APPTAINER, nvidia=True, fabric=(), user=1000, group=1000, login="ada")
    assert argv(RUN, inside) == (
        "apptainer", "exec", "--nv", "--bind", "/h/code:/h/code", "--bind", "/h/g.zip:/h/g.zip:ro",
        "--pwd", "/h/code", "r/i@sha256:ab", "python3", "t.py",
    )  # fmt: skip


def launched(**env):
    run = replace(RUN, home="/h/home", runtime=ContainerRuntime.DOCKER)
    environment = tuple({"HF_TOKEN": "hf_x", "LR": "0.1", **env}.items())
    launch = Launch(attempt=3, argv=("python3", "t.py"), directory="/h/code", env=environment, container=run)
    return compose(replace(launch, hidden=("HF_TOKEN",)), Path("/h/attempts/0003"))


def passed(composed):
    words = composed.argv
    return {word for flag, word in itertools.pairwise(words) if flag == "--env"}


def test_a_login_that_the_image_does_not_know_has_a_home_and_a_name_in_it(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    named = {"HF_TOKEN", "LR", "GPUCLOUD_ATTEMPT_DIR"}
    assert passed(launched()) >= {*named, "HOME=/h/home", "USER=uid4000000", "LOGNAME=uid4000000"}
    own = passed(launched(HOME="/data/me", USER="ada"))
    assert own >= {*named, "HOME=/data/me", "USER", "LOGNAME=uid4000000"}


def test_a_jobs_path_is_for_its_container_and_not_for_finding_docker():
    composed = launched(PATH="/opt/conda/bin", LD_PRELOAD="/x.so")
    assert passed(composed) >= {"PATH=/opt/conda/bin", "LD_PRELOAD=/x.so"}
    assert {"PATH", "LD_PRELOAD"}.isdisjoint(composed.given)
    assert "hf_x" not in " ".join(composed.argv)


def test_only_dockers_container_needs_an_end_of_its_own():
    assert end_argv(RUN, ContainerRuntime.DOCKER) == ("docker", "rm", "--force", "gpucloud-digits-3-0")
    assert end_argv(RUN, ContainerRuntime.APPTAINER) == ()


@pytest.mark.parametrize(
    ("reference", "registry"),
    [
        ("pytorch/pytorch:2.13", "https://index.docker.io/v1/"),
        ("ubuntu", "https://index.docker.io/v1/"),
        ("registry.example.com/a/b:1", "registry.example.com"),
        ("localhost:5000/a", "localhost:5000"),
        ("localhost/a", "localhost"),
    ],
)
def test_a_login_is_for_the_registry_that_the_image_names(reference, registry):
    assert registry_of(reference) == registry
