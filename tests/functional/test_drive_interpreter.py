"""The Python of a machine that drives its job: found, else made from an index, once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from gpucloud.adapters.package import package_zip
from tests.standins.packages import serving, wheel

_ASK = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from gpucloud.agent.drive.interpreter import able, make
from gpucloud.domain.errors import NodeError
before = able()
try:
    made = make(sys.argv[2] or None)
except NodeError as error:
    made = f"{error.message}|{error.hint}"
print(json.dumps([before, made, able()]))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without boto3 and paramiko, as an image's."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


def asked(folder: Path, python: str, mirror: str = "") -> list[str | None]:
    """What the node says of an interpreter before, of making one, and after."""
    package = folder / "package.zip"
    package.write_bytes(package_zip()[0])
    (folder / "home").mkdir(exist_ok=True)
    env = {"HOME": str(folder / "home"), "PATH": f"{Path(uv.find_uv_bin()).parent}:/usr/bin:/bin"}
    argv = [python, "-c", _ASK, str(package), mirror]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_the_machines_own_python_drives_if_it_has_what_it_needs(tmp_path: Path) -> None:
    assert asked(tmp_path, sys.executable) == [sys.executable] * 3
    assert not (tmp_path / "home" / ".gpucloud" / "layers").exists()


def test_else_one_is_made_from_the_jobs_mirror_and_found_again(tmp_path: Path, bare: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "boto3", "1.44.0")
    wheel(wheels, "paramiko", "5.1.0")
    with serving(wheels) as index:
        before, made, after = asked(tmp_path, bare, index.url)
        assert before is None
        assert made == after
        assert {path.strip("/").split("/")[-1] for path in index.asked if path.endswith("/")} >= {"boto3", "paramiko"}
        requests = len(index.asked)
        assert asked(tmp_path, bare, index.url) == [made] * 3
        assert len(index.asked) == requests
    says = [str(made), "-c", "import boto3, paramiko; print(boto3.__version__, paramiko.__version__)"]
    assert subprocess.run(says, capture_output=True, text=True, check=True).stdout == "1.44.0 5.1.0\n"


def test_where_none_can_be_made_it_says_why_and_what_to_do(tmp_path: Path, bare: str) -> None:
    (tmp_path / "empty").mkdir()
    with serving(tmp_path / "empty") as index:
        before, said, after = asked(tmp_path, bare, index.url)
    assert (before, after) == (None, None)
    assert str(said).startswith("no Python that can drive the job could be made: ")
    assert str(said).endswith("|let machines reach a package index: mirrors: {pip: https://…/simple}")
