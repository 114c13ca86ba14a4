"""The Python of a machine that drives its job: found, else made from an index, once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import uv

from gpucloud.adapters.packaging import archived, package_zip
from tests.standins.packages import serving, wheel

_LOCK = "gpucloud/agent/drive/requirements.lock"
_ASK = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from gpucloud.agent.drive.starting import able, make
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


def locked(*wheels: Path) -> bytes:
    """Return a lock of these files."""
    lines = []
    for path in wheels:
        project, version, *_ = path.name.split("-")
        lines.append(f"{project}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    return "".join(lines).encode()


def asked(folder: Path, python: str, mirror: str = "", lock: bytes | None = None) -> list[str | None]:
    """What the node says of an interpreter before, of making one, and after; `lock` in place of gpucloud's own."""
    package = folder / "package.zip"
    package.write_bytes(package_zip()[0])
    with zipfile.ZipFile(package) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert b"boto3==" in files[_LOCK]
    package.write_bytes(archived(files | {_LOCK: lock or files[_LOCK]}))
    (folder / "home").mkdir(exist_ok=True)
    env = {"HOME": str(folder / "home"), "PATH": f"{Path(uv.find_uv_bin()).parent}:/usr/bin:/bin"}
    env["XDG_CONFIG_DIRS"] = str(folder)  # no pip.conf of this machine's
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
    lock = locked(*wheels.iterdir())
    with serving(wheels) as index:
        before, made, after = asked(tmp_path, bare, index.url, lock)
        assert before is None
        assert made == after
        assert {path.strip("/").split("/")[-1] for path in index.asked if path.endswith("/")} >= {"boto3", "paramiko"}
        requests = len(index.asked)
        assert asked(tmp_path, bare, index.url, lock) == [made] * 3
        assert len(index.asked) == requests
    says = [str(made), "-c", "import boto3, paramiko; print(boto3.__version__, paramiko.__version__)"]
    assert subprocess.run(says, capture_output=True, text=True, check=True).stdout == "1.44.0 5.1.0\n"


def test_what_an_index_has_under_the_same_name_is_taken_by_its_hash_alone(tmp_path: Path, bare: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "boto3", "1.44.0")
    wheel(wheels, "paramiko", "5.1.0")
    lock = locked(*wheels.iterdir())
    (planted,) = wheels.glob("boto3-*")
    with zipfile.ZipFile(planted, "a") as archive:
        archive.writestr("boto3/planted.py", "raise SystemExit")
    with serving(wheels) as index:
        before, said, after = asked(tmp_path, bare, index.url, lock)
    assert (before, after) == (None, None)
    assert str(said).startswith("no Python that can drive the job could be made: ")
    assert "hash" in str(said).lower()


def test_where_none_can_be_made_it_says_why_and_what_to_do(tmp_path: Path, bare: str) -> None:
    (tmp_path / "empty").mkdir()
    with serving(tmp_path / "empty") as index:
        before, said, after = asked(tmp_path, bare, index.url)
    assert (before, after) == (None, None)
    assert str(said).startswith("no Python that can drive the job could be made: ")
    assert str(said).endswith("|let machines reach a package index: mirrors: {pip: https://…/simple}")
