"""An Ubuntu in a folder: real apt, dpkg and packages; of a machine with a GPU it has the PCI bus and one package."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from gpucloud.adapters.packaging import package_zip
from gpucloud.domain.codec import to_json

KERNEL = "6.8.0-1-standin"
PREBUILT = f"linux-modules-nvidia-580-server-open-{KERNEL}"
REAL = ("nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server")
SCRIPT = Path("/usr/share/debootstrap/scripts/gutsy")

# The node's command, as it is shipped, on a machine that says it runs another kernel than this one.
_AS_IF = f"""\
import platform, sys
platform.release = lambda: {KERNEL!r}
sys.path.insert(0, "/root/gpucloud.zip")
sys.argv = ["/root/gpucloud.zip", *sys.argv[1:]]
from gpucloud.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
_POSTINST = f"#!/bin/sh\nset -e\ndepmod {KERNEL}\n"
_MODULE = 'const char version[] __attribute__((section(".modinfo"), used)) = "version=580.178.04";'


class UbuntuRoot:
    """One root; `made_from` copies another one, a few seconds instead of a minute."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def debootstrapped(cls, path: Path) -> UbuntuRoot:
        assert os.geteuid() == 0, "needs root: sudo pytest -m slow"
        root = cls(path)
        mirror = re.search(r"default_mirror (http://archive\S+)", SCRIPT.read_text())[1]
        argv = ["debootstrap", "--no-check-gpg", "--variant=minbase", "--include=python3,ca-certificates",
                "--components=main,restricted,universe", "noble", str(path), mirror, str(SCRIPT)]  # fmt: skip
        subprocess.run(argv, check=True, capture_output=True)
        sources = path / "etc" / "apt" / "sources.list"
        sources.write_text(f"{sources.read_text()}deb {mirror} noble-updates main restricted universe\n")
        shutil.copy("/etc/resolv.conf", path / "etc" / "resolv.conf")
        root.give_it_a_gpu()
        root.add_the_package_that_mirrors_lack()
        root.run("apt-get", "-qq", "update")
        # Fetched once for all copies; what the tests measure is not the network.
        root.run("apt-get", "-qq", "-y", "install", "--no-install-recommends", "--download-only", PREBUILT, *REAL)
        return root

    def copied(self, path: Path) -> UbuntuRoot:
        subprocess.run(["cp", "-a", str(self.path), str(path)], check=True)
        return UbuntuRoot(path)

    def give_it_a_gpu(self) -> None:
        folder = self.path / "sys" / "bus" / "pci" / "devices" / "0000:00:1e.0"
        folder.mkdir(parents=True)
        for name, value in {"vendor": "0x10de", "device": "0x2237", "class": "0x030200"}.items():
            (folder / name).write_text(f"{value}\n")

    def add_the_package_that_mirrors_lack(self) -> None:
        """Make the modules of a kernel that nobody runs, with the dependencies of Ubuntu's, in an archive of one."""
        tree = self.path / "standin" / "tree"
        modules = tree / "lib" / "modules" / KERNEL / "kernel"
        modules.mkdir(parents=True)
        compiler = ["gcc", "-c", "-x", "c", "-o", str(modules / "nvidia.ko"), "-"]
        subprocess.run(compiler, input=_MODULE, text=True, check=True)
        control = tree / "DEBIAN"
        control.mkdir()
        (control / "control").write_text(
            f"Package: {PREBUILT}\nVersion: 6.8.0-1.1\nArchitecture: amd64\nMaintainer: t <t@example.com>\n"
            "Depends: kmod, nvidia-kernel-common-580-server (>= 580)\nDescription: a stand-in\n"
        )
        (control / "postinst").write_text(_POSTINST)
        (control / "postinst").chmod(0o755)
        subprocess.run(["dpkg-deb", "-b", str(tree), str(tree.parent)], check=True, capture_output=True)
        shutil.rmtree(tree)
        (deb,) = tree.parent.glob("*.deb")
        fields = subprocess.run(["dpkg-deb", "-f", str(deb)], check=True, capture_output=True, text=True).stdout
        (tree.parent / "Packages").write_text(
            f"{fields}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\n"
            f"SHA256: {hashlib.sha256(deb.read_bytes()).hexdigest()}\n"
        )
        lists = self.path / "etc" / "apt" / "sources.list.d" / "standin.list"
        lists.write_text("deb [trusted=yes] file:/standin ./\n")

    def start(self, wanted) -> subprocess.Popen:
        """Start the node's `machine` command there, in a process group of its own, with /proc."""
        (self.path / "root" / "gpucloud.zip").write_bytes(package_zip()[0])
        (self.path / "root" / "as_if.py").write_text(_AS_IF)
        inside = (
            'mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/python3 /root/as_if.py machine --root /root/g'
        )
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, "sh", str(self.path)]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={"PATH": os.environ["PATH"], "HOME": "/root"},
        )  # fmt: skip
        process.stdin.write(to_json(wanted))
        process.stdin.close()
        process.stdin = None
        return process

    def make(self, wanted) -> tuple[int, dict]:
        """Run the command there and return its exit code and its answer."""
        process = self.start(wanted)
        stdout, stderr = process.communicate(timeout=900)
        assert stdout, stderr
        return process.returncode, json.loads(stdout.splitlines()[-1])

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        return subprocess.run(["chroot", str(self.path), *argv], check=check, capture_output=True, text=True, env=env)

    def state(self, package: str) -> str:
        """Return what dpkg says of the package: `hold ok installed`."""
        return self.run("dpkg-query", "-W", "-f", "${Status}", package, check=False).stdout

    def dpkg_log(self) -> str:
        path = self.path / "var" / "log" / "dpkg.log"
        return path.read_text() if path.exists() else ""

    def held_lock(self, name: str):
        """Return the open file that holds one of apt's locks, as another apt does; closing it releases it."""
        file = (self.path / name).open("w")
        fcntl.lockf(file, fcntl.LOCK_EX)
        return file
