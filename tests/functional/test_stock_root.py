"""A real stock system, made by debootstrap: its Python has neither pip nor ensurepip. Needs root and the network."""

from __future__ import annotations

import os
import platform
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.agent.layer.environment import read_ready
from gpucloud.domain.codec import to_json
from gpucloud.domain.node.layer import PIP_VERSION, PIP_WHEEL, LayerOrder, LayerWanted, setup_digest
from tests.standins.packages import serving, wheel

pytestmark = [pytest.mark.slow, pytest.mark.engine(name="debootstrap")]

SETUP = "uv pip install greeter && pip list && python -m pip --version && python -c 'import greeter'"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return the folder of a minimal system with python3, of this machine's own release and archive."""
    form = "$(CODENAME) $(REPO_URI)"
    said = subprocess.run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"], capture_output=True)
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    lines = [line.split() for line in said.stdout.decode().splitlines()]
    archive = next(uri for codename, uri in lines if codename == release)
    folder = tmp_path_factory.mktemp("stock")
    argv = ["debootstrap", "--variant=minbase", "--include=python3", release, str(folder), archive]
    made = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """Return a folder with the pinned pip as PyPI has it, and a small wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"pip=={PIP_VERSION}"]
    subprocess.run(argv, check=True)
    assert (folder / PIP_WHEEL.name).is_file()
    wheel(folder, "greeter", "1.0")
    return folder


def test_a_stock_system_gets_the_pinned_uv_from_pypi_and_pip_from_the_mirror_and_setup_runs_unchanged(root, wheels):
    (root / "root" / "package.zip").write_bytes(package_zip()[0])
    trusted = ssl.get_default_verify_paths()
    shutil.copy(trusted.cafile or trusted.openssl_cafile, root / "root" / "certificates.pem")
    wanted = LayerWanted(digest=setup_digest(SETUP, (), ""), always=True, boto3=False, torch=False)
    with serving(wheels, as_json=True) as index:
        order = LayerOrder(wanted=wanted, setup=SETUP, code="/root", pip_mirror=index.url)
        bare = inside(root, "python3 -m pip --version; python3 -c 'import ensurepip'")
        assert "No module named pip" in bare.stderr
        assert "No module named 'ensurepip'" in bare.stderr
        done = inside(root, "exec python3 /root/package.zip layer", to_json(order))
        assert (done.returncode, done.stdout) == (0, "ready\n"), done.stdout + done.stderr
    (ready,) = (root / "root/.gpucloud/layers").glob("*/ready.json")
    layer = read_ready(ready.parent)
    assert layer is not None
    assert layer.uv == "0.13.9"
    assert "greeter==1.0" in layer.packages
    assert " + greeter==1.0" in (ready.parent.parent / f"{layer.key}.log").read_text()  # uv's words


def inside(root: Path, line: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    assert os.getuid() == 0, "chroot needs root"
    env = {"HOME": "/root", "PATH": "/usr/bin:/bin", "SSL_CERT_FILE": "/root/certificates.pem"}
    argv = [shutil.which("chroot") or "/usr/sbin/chroot", str(root), "/bin/sh", "-c", line]
    return subprocess.run(argv, input=stdin, env=env, capture_output=True, text=True, timeout=120)
