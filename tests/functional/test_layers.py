"""Layers made for real by the shipped package, from a real index on loopback, on interpreters that lack things."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import uv

from gpucloud.adapters.packaging import package_zip
from gpucloud.agent.layer import build
from gpucloud.agent.layer.environment import Places
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.node.bootstrap.facts import Asked, Facts, Layer
from gpucloud.domain.node.layer import LayerOrder, LayerWanted, setup_digest
from tests.standins.packages import serving, wheel

# As torch writes its version file; the wheel is a stand-in: torch's own are gigabytes.
VERSION = "from typing import Optional\n\ncuda: Optional[str] = {!r}\nhip: Optional[str] = None\n"


class Node:
    """A login with a home, an interpreter and the package; commands run as over SSH."""

    def __init__(self, folder: Path, python: str, *, path: str = "/usr/bin:/bin"):
        self.home = folder / "home"
        self.code = folder / "code"
        for made in (self.home, self.code):
            made.mkdir(parents=True, exist_ok=True)
        self.zip = folder / "package.zip"
        self.zip.write_bytes(package_zip()[0])
        self.python = python
        no_pip_conf = {"XDG_CONFIG_DIRS": str(folder)}  # of this machine
        self.env = {"HOME": str(self.home), "PATH": path, **no_pip_conf}
        self.layers = self.home / ".gpucloud" / "layers"

    def argv(self, command: str) -> list[str]:
        return [self.python, str(self.zip), command]

    def run(self, command: str, stdin: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(command), input=stdin, env=self.env, capture_output=True, text=True, timeout=180
        )

    def layer(self, wanted: LayerOrder) -> Layer:
        """Make the layer and return what facts say of it."""
        done = self.run("layer", to_json(wanted))
        assert done.returncode == 0, done.stdout + done.stderr
        return self.fact(wanted)

    def fact(self, wanted: LayerOrder) -> Layer:
        facts = from_json(Facts, self.run("facts", to_json(Asked(layer=wanted.wanted))).stdout)
        assert facts.layer is not None
        return facts.layer

    def order(self, setup: str = "", *, boto3=False, torch=False, **changes) -> LayerOrder:
        asked = LayerWanted(
            digest=setup_digest(setup, (), "", requirements=(str(boto3), str(torch))), always=bool(setup), boto3=boto3,
            torch=torch,
        )  # fmt: skip
        return LayerOrder(wanted=asked, setup=setup, code=str(self.code), **changes)

    def shown(self, layer: Layer, code: str) -> str:
        return subprocess.run([layer.python, "-c", code], capture_output=True, text=True, env=self.env).stdout.strip()


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> str:
    """Return an interpreter without pip and without packages, as a stock Ubuntu's (here: an empty environment)."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def with_pip(tmp_path_factory) -> str:
    """Return an interpreter that has pip and nothing else."""
    folder = tmp_path_factory.mktemp("with_pip")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def uv_folder() -> str:
    """Return the folder of the real uv, which the node has on its PATH."""
    return str(Path(uv.find_uv_bin()).parent)


@pytest.fixture
def wheels(tmp_path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "alpha", "1.2", needs="Requires-Dist: beta\n")
    wheel(folder, "beta", "0.3")
    wheel(folder, "boto3", "1.99")
    for version, cuda in (("2.12.0", "13.0"), ("2.14.0", "13.2")):
        wheel(folder, "torch", version, files={"torch/version.py": VERSION.format(cuda)})
    return folder


@pytest.fixture
def index(wheels):
    with serving(wheels) as running:
        yield running


def test_uv_of_the_node_installs_from_the_mirror(tmp_path, bare, uv_folder, index):
    node = Node(tmp_path, bare, path=f"{uv_folder}:/usr/bin:/bin")
    made = node.layer(node.order("uv pip install alpha", pip_mirror=index.url))
    assert made.uv == ".".join(str(part) for part in uv_version())
    assert node.shown(made, "import alpha, beta; print(alpha.__version__, beta.__version__)") == "1.2 0.3"
    assert made.packages == ("alpha==1.2", "beta==0.3")
    assert (Path(made.python).parents[1] / "lib").exists()
    installers = list(Path(made.python).parents[1].glob("lib/*/site-packages/alpha-1.2.dist-info/INSTALLER"))
    assert [file.read_text() for file in installers] == ["uv"]
    assert (node.home / ".gpucloud" / "cache" / "uv").is_dir()


def test_a_setup_that_calls_pip_gets_pip_and_is_told_that_it_takes_longer(tmp_path, with_pip, index):
    node = Node(tmp_path, with_pip)
    order = node.order("pip install alpha; python -m pip freeze >seen", pip_mirror=index.url)
    done = node.run("layer", to_json(order))
    assert done.stdout == (
        "note: setup: `pip install` takes longer than `uv pip install`, which works here too\nready\n"
    )
    made = node.fact(order)
    assert made.uv is None
    assert node.shown(made, "import alpha; print(alpha.__version__)") == "1.2"
    assert "alpha==1.2" in (node.code / "seen").read_text()
    assert "/simple/uv/" not in index.asked


def test_what_the_base_has_is_not_fetched_again_and_is_no_part_of_the_layer(tmp_path, bare, uv_folder, index):
    argv = [uv.find_uv_bin(), "venv", "-q", "--python", sys.executable, str(tmp_path / "base")]
    subprocess.run(argv, check=True)
    base = str(tmp_path / "base" / "bin" / "python")
    argv = [uv.find_uv_bin(), "pip", "install", "-q", "--no-cache", "--python", base, "--default-index", index.url]
    subprocess.run([*argv, "beta", "boto3"], check=True)
    index.asked.clear()
    node = Node(tmp_path, base, path=f"{uv_folder}:/usr/bin:/bin")
    made = node.layer(node.order("uv pip install alpha; uv pip install --reinstall boto3", pip_mirror=index.url))
    assert not any(path.startswith("/files/beta") for path in index.asked)
    assert made.packages == ("alpha==1.2", "boto3==1.99")
    assert node.shown(made, "import alpha, beta; print(beta.__file__)").startswith(str(tmp_path / "base"))
    infos = Path(made.python).parents[1].glob("lib/python3*/site-packages/*.dist-info")
    assert sorted(info.name for info in infos) == ["alpha-1.2.dist-info", "boto3-1.99.dist-info"]


def test_a_node_whose_index_has_no_uv_says_so_in_the_setups_log(tmp_path, with_pip, index):
    node = Node(tmp_path, with_pip)
    done = node.run("layer", to_json(node.order("uv pip install alpha", pip_mirror=index.url)))
    assert done.returncode != 0
    assert "/simple/uv/" in index.asked
    (log,) = node.layers.glob("*.log")
    assert log.read_text().startswith("without uv: pip has no uv==0.13.9: No matching distribution found for uv==")


def test_a_second_layer_takes_what_the_first_one_fetched_from_the_cache(tmp_path, bare, uv_folder, index):
    node = Node(tmp_path, bare, path=f"{uv_folder}:/usr/bin:/bin")
    node.layer(node.order("uv pip install alpha", pip_mirror=index.url))
    fetched = [path for path in index.asked if path.startswith("/files/alpha")]
    node.layer(node.order("uv pip install alpha # again", pip_mirror=index.url))
    assert [path for path in index.asked if path.startswith("/files/alpha")] == fetched


def test_pip_does_what_uv_does_not_beside_it(tmp_path, with_pip, uv_folder, index):
    node = Node(tmp_path, with_pip, path=f"{uv_folder}:/usr/bin:/bin")
    setup = "pip install --target there alpha; pip install beta; pip uninstall -y beta; pip list >seen"
    made = node.layer(node.order(setup, pip_mirror=index.url))
    assert (node.code / "there" / "alpha" / "__init__.py").is_file()
    assert node.shown(made, "import beta") == ""
    assert not any(package.startswith("beta") for package in made.packages)


def test_a_python_without_pip_where_nothing_can_be_had_is_named_with_the_reason(tmp_path, bare):
    node = Node(tmp_path, bare)
    node.env["https_proxy"] = "http://127.0.0.1:1"  # nobody is there
    done = node.run("layer", to_json(node.order("pip install alpha")))
    assert done.returncode == 1
    assert done.stdout.startswith("the node has no uv, and none could be had: https://files.pythonhosted.org/packages/")
    assert "refused" in done.stdout
    assert not node.fact(node.order("pip install alpha")).ready


def test_a_setup_that_installs_nothing_needs_no_index_at_all(tmp_path, bare):
    node = Node(tmp_path, bare)
    made = node.layer(node.order("echo run >>runs", env=(("PIP_NO_INDEX", "1"),)))
    assert made.ready
    assert (node.code / "runs").read_text() == "run\n"


def test_what_a_setup_left_in_a_tree_of_code_is_made_again_where_the_tree_was_removed_and_came_back(
    tmp_path, bare, uv_folder, index
):
    node = Node(tmp_path, bare, path=f"{uv_folder}:/usr/bin:/bin")
    setup = "uv pip install alpha && mkdir net && echo made >net/a.txt"
    order = node.order(setup, pip_mirror=index.url)
    order = replace(order, wanted=replace(order.wanted, tree=order.code))
    made = node.layer(order)
    kept = Path(made.python).parents[1] / "used-by-a-running-script"
    kept.touch()
    for back in range(2):
        node.code.rename(tmp_path / f"removed-{back}")
        node.code.mkdir()
        assert not node.fact(order).ready
        assert node.layer(order) == made
        assert (node.code / "net" / "a.txt").exists()
        assert kept.exists()


def test_a_setup_that_runs_again_leaves_no_older_boto3_than_a_store_needs(tmp_path, bare, uv_folder, wheels, index):
    wheel(wheels, "boto3", "1.34")
    node = Node(tmp_path, bare, path=f"{uv_folder}:/usr/bin:/bin")
    order = node.order("uv pip install boto3==1.34 && mkdir net", pip_mirror=index.url, boto3=True)
    order = replace(order, wanted=replace(order.wanted, tree=order.code))
    assert node.layer(order).boto3 == "1.99"
    node.code.rename(tmp_path / "removed")
    node.code.mkdir()
    assert node.layer(order).boto3 == "1.99"


def test_a_layer_that_is_of_no_tree_of_code_stays_ready_without_it(tmp_path, with_pip):
    node = Node(tmp_path, with_pip)
    order = node.order("echo run >>$HOME/runs")
    assert node.layer(order).ready
    node.code.rename(tmp_path / "removed")
    assert node.layer(order).ready
    assert (node.home / "runs").read_text() == "run\n"


def test_a_setup_that_fails_in_a_tree_that_came_back_leaves_the_layer_and_runs_again(tmp_path, with_pip):
    node = Node(tmp_path, with_pip)
    order = node.order("test ! -e $HOME/away && echo >made")
    order = replace(order, wanted=replace(order.wanted, tree=order.code))
    assert node.layer(order).ready
    node.code.rename(tmp_path / "removed")
    node.code.mkdir()
    (node.home / "away").touch()
    assert node.run("layer", to_json(order)).returncode != 0
    assert not node.fact(order).ready
    (node.home / "away").unlink()
    assert node.layer(order).ready
    assert (node.code / "made").exists()


def test_torch_comes_within_the_tested_range_from_its_mirror_and_the_rest_from_the_other(
    tmp_path, bare, uv_folder, wheels
):
    """A stand-in torch: its own are gigabytes."""
    with serving(wheels) as packages, serving(wheels) as pytorch:
        node = Node(tmp_path, bare, path=f"{uv_folder}:/usr/bin:/bin")
        order = node.order("uv pip install beta", torch=True, pip_mirror=packages.url, torch_mirror=pytorch.url)
        made = node.layer(order)
        assert (made.torch, made.torch_cuda, made.torch_backend) == ("2.12.0", "13.0", "cpu")
        assert "/simple/torch/" in pytorch.asked
        assert not any("beta" in path for path in pytorch.asked)
        assert not any("torch" in path for path in packages.asked)


def test_torch_comes_from_the_mirror_of_packages_where_it_has_none_of_its_own(tmp_path, bare, uv_folder, index):
    node = Node(tmp_path, bare, path=f"{uv_folder}:/usr/bin:/bin")
    assert node.layer(node.order(torch=True, pip_mirror=index.url)).torch == "2.12.0"


def test_a_second_layer_of_the_same_kind_waits_for_the_first_and_says_so(tmp_path, with_pip):
    node = Node(tmp_path, with_pip)
    order = node.order("sleep 2; echo run >>runs")
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(node.run("layer", to_json(order)).stdout)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.splitlines()[-1] for answer in answers) == ["ready", "ready"]
    assert sum("note: waited " in answer for answer in answers) == 1
    assert (node.code / "runs").read_text() == "run\n"


@pytest.mark.parametrize("after_s", [0.6, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 1.5))])
def test_a_build_killed_at_any_point_is_finished_by_the_next(tmp_path, with_pip, index, after_s):
    node = Node(tmp_path, with_pip)
    order = node.order("pip install -q beta; sleep 1", pip_mirror=index.url)
    killed = subprocess.Popen(
        node.argv("layer"), env=node.env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert killed.stdin is not None
    with killed.stdin:
        killed.stdin.write(to_json(order))
    time.sleep(after_s)  # any moment will do: the next build must finish from every one
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    made = node.layer(order)
    assert made.ready
    assert node.shown(made, "import beta; print(beta.__version__)") == "0.3"


def test_old_layers_are_removed_save_the_newest_the_used_and_the_one_in_hand(tmp_path):
    places = Places(layers=tmp_path, tools=tmp_path / ".bin", cache=tmp_path / ".cache")
    old = time.time() - 30 * 86400
    for number in range(8):
        folder = tmp_path / f"layer{number}"
        (folder / "bin").mkdir(parents=True)
        (folder / "ready.json").write_text("{}")
        (tmp_path / f"layer{number}.log").touch()
        os.utime(folder / "ready.json", (old - number, old - number))
    os.utime(tmp_path / "layer7" / "ready.json")
    used = subprocess.Popen(["sleep", "60"], env={"PATH": f"{tmp_path / 'layer5' / 'bin'}:/usr/bin:/bin"})
    try:
        assert build.collect(places, keep="layer6") == ("layer3", "layer4")
    finally:
        used.kill()
        used.wait()
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["layer0", "layer1", "layer2", "layer5", "layer6", "layer7"]
    assert not (tmp_path / "layer3.log").exists()


def uv_version() -> tuple[int, ...]:
    said = subprocess.run([uv.find_uv_bin(), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.split()[1].split("."))


def test_facts_of_another_layer_do_not_make_one(tmp_path, with_pip):
    node = Node(tmp_path, with_pip)
    fact = node.fact(node.order("pip install alpha"))
    assert (fact.ready, fact.torch_backend) == (False, "cpu")
    assert json.loads(node.run("facts", "{}").stdout)["layer"] is None


def stand_in_conda(folder: Path, name: str, log: Path) -> str:
    """Write a program that makes a plain virtual environment where conda would make its own; return its folder."""
    folder.mkdir()
    program = folder / name
    program.write_text(f"""#!/bin/sh
[ "$1" = --version ] && echo 2.9.0 && exit 0
echo "$@" >>{log}
while [ "$1" != --prefix ]; do shift; done
exec {sys.executable} -m venv "$2"
""")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("micromamba", "create --yes --prefix {} --file {}\n"),
        pytest.param("conda", "env create --yes --prefix {} --file {}\n", marks=pytest.mark.slow),
    ],
)
def test_a_conda_environment_of_a_stand_in_conda_is_made_once_and_setup_runs_inside_it(
    tmp_path, bare, index, name, words
):
    folder = stand_in_conda(tmp_path / "conda", name, tmp_path / "asked")
    node = Node(tmp_path, bare, path=f"{folder}:/usr/bin:/bin")
    (node.code / "environment.yml").write_text("dependencies: [python=3.11]\n")
    setup = 'pip install -q beta; echo "$CONDA_PREFIX" >prefix'
    order = node.order(setup, pip_mirror=index.url, conda="environment.yml")
    made = node.layer(order)
    node.layer(order)
    prefix = str(Path(made.python).parents[1])
    assert (tmp_path / "asked").read_text() == words.format(prefix, node.code / "environment.yml")
    assert (node.code / "prefix").read_text() == f"{prefix}\n"
    assert node.shown(made, "import beta, sys; print(beta.__version__, sys.prefix)") == f"0.3 {prefix}"


def test_a_node_without_conda_that_cannot_fetch_one_says_so_with_the_address(tmp_path, bare):
    node = Node(tmp_path, bare, path="/usr/bin:/bin")
    node.env["https_proxy"] = "http://127.0.0.1:1"  # nobody is there
    done = node.run("layer", to_json(node.order("true", conda="environment.yml")))
    assert done.returncode == 1
    assert done.stdout.startswith("conda: the node has no micromamba, mamba or conda, and none could be had: https://")
    assert "micromamba-linux-" in done.stdout
