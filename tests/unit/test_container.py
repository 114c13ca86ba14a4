from __future__ import annotations

import pytest

from gpucloud.agent.image import registry_of
from gpucloud.domain.container import ContainerRun, Inside, Mount, container_argv, end_argv
from gpucloud.domain.job import ContainerRuntime

RUN = ContainerRun(
    name="gpucloud-digits-3-0",
    image="r/i@sha256:ab",
    runtime=ContainerRuntime.AUTO,
    devices=(),
    gpus=2,
    mounts=(Mount(path="/h/code"), Mount(path="/h/g.zip", read_only=True)),
)
CPU = Inside(runtime=ContainerRuntime.DOCKER, nvidia=False, fabric=(), user=1000, group=1001)


def argv(run, inside):
    return container_argv(
        run, inside, folder="/h/attempts/0003", directory="/h/code", names=("A", "HF_TOKEN"), argv=("python3", "t.py")
    )


def test_docker_shares_the_hosts_network_and_user_and_takes_variables_by_name_only():
    assert argv(RUN, CPU) == (
        "docker", "run", "--rm", "--pull", "never",
        "--name", "gpucloud-digits-3-0", "--label", "gpucloud.attempt=/h/attempts/0003",
        "--network", "host", "--ipc", "host", "--user", "1000:1001",
        "--volume", "/h/code:/h/code", "--volume", "/h/g.zip:/h/g.zip:ro",
        "--workdir", "/h/code", "--env", "A", "--env", "HF_TOKEN",
        "--entrypoint", "python3", "r/i@sha256:ab", "t.py",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "asked"),
    [((), '"device=0,1"'), (("2", "3"), '"device=2,3"'), (("GPU-aa",), '"device=GPU-aa"')],
)
def test_docker_is_handed_exactly_the_jobs_gpus_with_room_for_pinned_memory(devices, asked):
    run = ContainerRun(name=RUN.name, image=RUN.image, runtime=RUN.runtime, devices=devices, gpus=2, mounts=RUN.mounts)
    gpus = Inside(runtime=ContainerRuntime.DOCKER, nvidia=True, fabric=("/dev/infiniband/uverbs0",), user=0, group=0)
    words = argv(run, gpus)
    at = words.index("--gpus")
    assert words[at : at + 8] == (
        "--gpus", asked, "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--device", "/dev/infiniband/uverbs0",
    )  # fmt: skip


def test_apptainer_runs_its_command_as_a_child_with_the_environment_as_it_is():
    inside = Inside(runtime=ContainerRuntime.APPTAINER, nvidia=True, fabric=(), user=1000, group=1000)
    assert argv(RUN, inside) == (
        "apptainer", "exec", "--nv", "--bind", "/h/code:/h/code", "--bind", "/h/g.zip:/h/g.zip:ro",
        "--pwd", "/h/code", "r/i@sha256:ab", "python3", "t.py",
    )  # fmt: skip


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
