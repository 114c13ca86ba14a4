"""What is read from programs and the network: apt's plans, OpenPGP keys; and the shell that root runs."""

from __future__ import annotations

import base64
import shutil
import subprocess

import pytest

from gpucloud.agent.gate.check import memlock
from gpucloud.agent.machine.gather import mig_instances, tells_of_gpus
from gpucloud.agent.machine.making import binary, fingerprint
from gpucloud.domain.node.machine import decide, packages
from gpucloud.domain.node.machine.facts import MigInstance
from gpucloud.domain.node.machine.packages import simulated
from gpucloud.usecases.supervise.bootstrap import REBOOT

# Written by apt 2.8 of Ubuntu 24.04, `apt-get -s install`, shortened.
PLAN = """\
Reading package lists...
The following NEW packages will be installed:
  adduser kmod
Inst adduser (3.137ubuntu1 Ubuntu:24.04/noble [all])
Inst libc6 [2.39-0ubuntu8.3] (2.39-0ubuntu8.6 Ubuntu:24.04/noble-updates [amd64]) []
Inst nvidia-utils-580-server (580.178.04-0ubuntu0.24.04.1 Ubuntu:24.04/noble-updates [amd64])
Conf adduser (3.137ubuntu1 Ubuntu:24.04/noble [all])
"""


def test_what_apt_would_install_is_read_from_its_plan():
    assert simulated(PLAN) == (
        ("adduser", "3.137ubuntu1"),
        ("libc6", "2.39-0ubuntu8.6"),
        ("nvidia-utils-580-server", "580.178.04-0ubuntu0.24.04.1"),
    )


def test_the_parts_that_mig_cut_a_gpu_into_are_read_from_its_list():
    # As NVIDIA's MIG user guide shows it.
    listed = """\
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 1g.5gb          19       13          6:1     |
+-------------------------------------------------------+
|   0  MIG 3g.20gb          9        2          0:4     |
+-------------------------------------------------------+
"""
    assert mig_instances(listed) == (
        MigInstance(gpu=0, profile="1g.5gb", number=13),
        MigInstance(gpu=0, profile="3g.20gb", number=2),
    )
    assert mig_instances("No MIG-enabled devices found.\n") == ()  # a genuine answer of an H100 without MIG


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (" Runtimes: io.containerd.runc.v2 nvidia runc", True),
        ("  cdi: nvidia.com/gpu=all", True),
        (" Runtimes: io.containerd.runc.v2 runc", False),
        (" Kernel Version: 6.8.0-1015-nvidia", False),
        (" Name: nvidia-host", False),
    ],
)
def test_docker_tells_of_gpus_by_its_runtimes_and_by_cdi(line, told):
    assert tells_of_gpus(f"Server:\n{line}\n Default Runtime: runc\n") is told


@pytest.mark.parametrize(("vendor", "needed"), [("0x1d0f", True), ("0x15b3", False)])
def test_memory_that_may_be_locked_counts_where_efa_needs_it(tmp_path, monkeypatch, vendor, needed):
    (tmp_path / "rdmap0s6" / "device").mkdir(parents=True)
    (tmp_path / "rdmap0s6" / "device" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 8 << 20))
    assert memlock(tmp_path) == (8 << 20 if needed else None)
    assert memlock(tmp_path / "absent") is None


@pytest.mark.parametrize("armored", [False, True])
def test_the_fingerprint_of_a_key_is_the_one_that_gpg_says(tmp_path, armored):
    gpg = shutil.which("gpg")
    assert gpg, "gpg is missing: apt-get install gnupg"
    home = ["--homedir", str(tmp_path), "--batch", "--quiet"]
    tmp_path.chmod(0o700)
    make = [gpg, *home, "--passphrase", "", "--quick-generate-key", "t <t@example.com>", "rsa2048", "sign", "never"]
    subprocess.run(make, check=True, capture_output=True)
    key = subprocess.run(
        [gpg, *home, *(["--armor"] if armored else []), "--export"], check=True, capture_output=True
    ).stdout
    shown = subprocess.run(
        [gpg, *home, "--with-colons", "--fingerprint"], check=True, capture_output=True, text=True
    ).stdout
    expected = next(line.split(":")[9] for line in shown.splitlines() if line.startswith("fpr:"))
    assert fingerprint(binary(key)) == expected
    assert not binary(key).startswith(b"-----")


@pytest.mark.parametrize(
    "torn", [b"", b"<html>", b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n", base64.b64decode("mQENBA==")]
)
def test_what_is_no_key_is_refused(torn):
    with pytest.raises(ValueError, match="OpenPGP"):
        fingerprint(binary(torn))


@pytest.mark.parametrize("text", [REBOOT, packages._WRITE, decide._UNPACK], ids=["reboot", "write", "unpack"])
def test_shellcheck_finds_nothing_in_what_root_runs(text):
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "shellcheck is missing: apt-get install shellcheck"
    done = subprocess.run([shellcheck, "-s", "sh", "-"], input=text, capture_output=True, text=True)
    assert done.stdout == ""
