"""The machine's steps with real apt and NVIDIA's real packages, in a debootstrapped Ubuntu 24.04.

A stand-in is what no folder has: the PCI bus of a machine with a GPU, the kernel that runs, and its modules, which
mirrors of the archive often lack. No module loads there, so that a run ends by asking for a reboot (101).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpucloud.domain.node.machine.facts import MachineWanted
from tests.standins.agent_node import wait_until
from tests.standins.ubuntu_root import PREBUILT, REAL, UbuntuRoot

pytestmark = [pytest.mark.slow, pytest.mark.engine(name="debootstrap"), pytest.mark.timeout(1200)]

RECORDED = Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml"
WANTED = MachineWanted(install=True, branch="", least_driver="580.65.06", gpus=1)
LOADS_NOT = "the driver's module does not load"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return UbuntuRoot.debootstrapped(tmp_path_factory.mktemp("ubuntu") / "base")


@pytest.fixture
def root(base, tmp_path):
    return base.copied(tmp_path / "root")


def test_first_run_second_run_and_the_holds_with_the_real_nvidia_smi_and_then_a_stand_in_for_it(root):
    code, answer = root.make(WANTED)
    assert (code, answer["said"]) == (101, LOADS_NOT), answer
    assert [name for name, _ in answer["steps"]] == ["lists", "driver", "hold", "module"]
    assert {name: root.state(name) for name in (PREBUILT, *REAL)} == dict.fromkeys(
        (PREBUILT, *REAL), "hold ok installed"
    )
    done = root.run("nvidia-smi", check=False)
    assert done.returncode == 9
    assert "couldn't communicate with the NVIDIA driver" in done.stdout

    before = root.dpkg_log()
    code, answer = root.make(WANTED)
    assert (code, [name for name, _ in answer["steps"]]) == (101, ["module"])
    assert root.dpkg_log() == before
    assert "nvidia" not in root.run("apt-get", "-s", "dist-upgrade").stdout.partition("Inst")[2]

    recorded = root.path / "usr" / "local" / "bin"
    (recorded / "h200.xml").write_text(RECORDED.read_text().replace("580.159.04", "580.178.04"))
    (recorded / "nvidia-smi").write_text("#!/bin/sh\ncat /usr/local/bin/h200.xml\n")
    (recorded / "nvidia-smi").chmod(0o755)
    assert root.make(WANTED) == (0, {"said": "ready", "hint": "", "steps": []})
    record = json.loads((root.path / "root" / "g" / "machine" / "ready.json").read_text())
    assert ["driver", "580.178.04"] in record["fact"]["versions"]
    assert ["installed", "gpucloud"] in record["fact"]["versions"]


def test_without_its_library_the_real_nvidia_smi_says_so_and_the_driver_is_not_taken_for_good(root):
    assert root.make(WANTED)[0] == 101
    for path in root.path.glob("usr/lib/x86_64-linux-gnu/libnvidia-ml.so*"):
        path.unlink()
    done = root.run("nvidia-smi", check=False)
    assert done.returncode == 12
    assert "couldn't find libnvidia-ml.so" in done.stdout
    assert root.make(WANTED)[0] == 101


@pytest.mark.parametrize("moment", ["half-installed libnvidia-compute", "half-configured nvidia"])
def test_killed_in_the_middle_of_apt_the_next_run_repairs_and_finishes(root, moment):
    process = root.start(WANTED)
    wait_until(lambda: moment in root.dpkg_log() or process.poll() is not None, f"dpkg to come to {moment}", 300)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert root.state(REAL[1]) != "hold ok installed"
    code, answer = root.make(WANTED)
    assert (code, answer["said"]) == (101, LOADS_NOT), answer
    assert root.state(REAL[1]) == "hold ok installed"
    assert root.run("dpkg", "--audit").stdout == ""


@pytest.mark.parametrize("lock", ["var/lib/apt/lists/lock", "var/lib/dpkg/lock-frontend"])
def test_a_lock_that_another_program_holds_is_waited_for(root, lock):
    held = root.held_lock(lock)
    process = root.start(WANTED)
    log = root.path / "root" / "g" / "machine" / "machine.log"
    wait_until(lambda: log.exists() and waiting(log.read_text()), "it to meet the lock", 120)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    held.close()
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 101, stdout + stderr
    assert root.state(REAL[1]) == "hold ok installed"


def waiting(log: str) -> bool:
    return "Could not get lock" in log or "Waiting for cache lock" in log


def test_a_file_that_the_archive_lists_and_has_not_is_passed_over_for_another_way(root):
    (deb,) = root.path.glob("standin/*.deb")
    for path in (deb, *root.path.glob(f"var/cache/apt/archives/{PREBUILT}_*.deb")):
        path.unlink()
    code, answer = root.make(MachineWanted(install=True, branch="", least_driver="580.65.06", gpus=1))
    assert code == 102
    # No archive has headers or modules of a kernel that nobody runs, and NVIDIA's is out of reach or has none either.
    assert [name for name, _ in answer["steps"]][:2] == ["lists", "lists"]
    assert PREBUILT not in answer["said"]
    assert root.state(REAL[1]) == ""
