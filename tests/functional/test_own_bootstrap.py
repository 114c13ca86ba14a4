"""The node's own bootstrap on this machine with another home: reboots, broken records, two at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.transfer.sync import whole_code
from gpucloud.domain.codec import to_json
from gpucloud.domain.node.bootstrap.wanted import NodeRecord, StoredCode, StoredPackage, Wanted
from tests.standins.agent_node import AgentNode, wait_until

# A stand-in for the machine going down: what waits for the reboot dies at once.
SYSTEMCTL = '#!/bin/sh\n[ "$1" = reboot ] && kill -9 "$(cat "$HOME/waits.pid")"\n'
SUDO = """#!/bin/sh
while :; do case "$1" in -u) shift 2 ;; --) shift; break ;; -*) shift ;; *) break ;; esac; done
exec "$@"
"""
REBOOTS = """
import os, sys
from pathlib import Path
from gpucloud.agent.boot import ThisHost
from gpucloud.agent.boot import PerBoot
root, package = Path(sys.argv[1]), Path(sys.argv[2])
Path.home().joinpath("waits.pid").write_text(str(os.getpid()))
PerBoot(root=root, package=package, login="me").restart(ThisHost(root), "", None)
"""


@dataclass
class Own:
    """A home on this machine, and its own bootstrap."""

    home: Path
    env: dict[str, str]
    record: NodeRecord
    code: bytes
    package: Path

    @property
    def root(self) -> Path:
        return self.home / ".gpucloud"

    @property
    def ended(self) -> dict[str, object] | None:
        path = self.root / "boot" / "ended.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def begin(self, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", str(self.package), "bootstrap", *options],
            env=self.env,
            cwd=self.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *options: str) -> tuple[int, dict[str, object]]:
        given = b"" if "--again" in options else to_json(self.record).encode() + b"\n" + self.code
        with self.begin(*options) as process:
            out, said = process.communicate(given, timeout=60)
        assert out, said.decode()
        return process.returncode, json.loads(out.splitlines()[-1])


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Own]:
    home, binaries, source = tmp_path / "home", tmp_path / "bin", tmp_path / "src"
    for folder in (home, binaries, source):
        folder.mkdir()
    for name, text in (("systemctl", SYSTEMCTL), ("sudo", SUDO)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    (source / "train.py").write_text("print(1)\n")
    data, sha256 = package_zip()
    whole = whole_code(source, limit=1000)
    tree, code = whole.sha256, whole.packed
    assert code is not None
    package = tmp_path / "gpucloud.zip"
    package.write_bytes(data)
    wanted = Wanted(
        package=sha256, code="", setup=None, setup_digest="d", env=(), torchrun=False, gpus=0, asks_for_gpus=False
    )
    yield Own(
        home=home,
        env={
            **os.environ,
            "HOME": str(home),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "GPUCLOUD_PYTHON": sys.executable,
            "GPUCLOUD_PER_BOOT": str(tmp_path / "per-boot"),
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        record=NodeRecord(
            version=1,
            login="me",
            package=StoredPackage(key="k", sha256=sha256),
            code=StoredCode(key="c", tree=tree),
            wanted=wanted,
        ),
        code=code,
        package=package,
    )
    AgentNode(home, package).destroy()


def test_it_makes_the_node_fit_and_a_second_run_changes_nothing(own: Own) -> None:
    code, ended = own.run()
    assert (code, ended["changed"], ended["error"]) == (0, ["agent"], None)
    assert own.record.code is not None
    assert (own.root / "code" / own.record.code.tree / "train.py").read_text() == "print(1)\n"
    code, again = own.run("--again")
    assert (code, again["changed"]) == (0, [])
    assert again["lock"] == ended["lock"]


def test_after_a_reboot_it_goes_on_and_no_later_boot_finds_it(own: Own, tmp_path: Path) -> None:
    own.run()
    (own.root / "boot" / "ended.json").unlink()
    waiting = [sys.executable, "-c", REBOOTS, str(own.root), str(own.package)]
    done = subprocess.run(waiting, env={**own.env, "PYTHONPATH": str(Path.cwd())}, timeout=60)
    assert done.returncode == -9
    script = tmp_path / "per-boot" / "gpucloud-bootstrap"
    assert script.stat().st_mode & 0o777 == 0o755
    subprocess.run([str(script)], env=own.env, check=True, timeout=10)
    wait_until(lambda: own.ended is not None, "the bootstrap to go on", 30)
    assert own.ended is not None
    assert own.ended["error"] is None
    wait_until(lambda: not script.exists(), "the script to go")


def test_a_machine_that_may_not_reboot_says_so(own: Own, tmp_path: Path) -> None:
    own.run()
    for program in ("systemctl", "reboot"):
        (tmp_path / "bin" / program).write_text("#!/bin/sh\necho not here >&2\nexit 1\n")
        (tmp_path / "bin" / program).chmod(0o755)
    waiting = [sys.executable, "-c", REBOOTS, str(own.root), str(own.package)]
    done = subprocess.run(waiting, env={**own.env, "PYTHONPATH": str(Path.cwd())}, capture_output=True, timeout=60)
    assert b"no reboot: not here" in done.stderr


def test_two_at_once_are_one_after_the_other(own: Own) -> None:
    own.run()
    both = [own.begin("--again") for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=60)[0].splitlines()[-1]) for process in both]
    assert [(answer["error"], answer["changed"]) for answer in answers] == [(None, []), (None, [])]


def test_a_package_that_the_record_does_not_name_is_refused(own: Own) -> None:
    own.record = replace(own.record, wanted=replace(own.record.wanted, package="ab"))
    assert own.run() == (14, own.ended)
    assert own.ended is not None
    assert own.ended["error"] == "the record is of another package than this one"


def test_a_record_that_cannot_be_read_is_refused(own: Own) -> None:
    own.run()
    (own.root / "boot" / "node.json").write_text('{"version": 1')
    code, ended = own.run("--again")
    assert code == 14
    assert "the node record cannot be read" in str(ended["error"])


def test_code_of_another_tree_is_refused(own: Own) -> None:
    own.record = replace(own.record, code=StoredCode(key="c", tree="ab" * 32))
    code, ended = own.run()
    assert (code, ended["error"]) == (14, "the code in the store is not whole: the manifest arrived damaged")


def test_code_above_the_limit_is_left_to_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 1001)
    assert whole_code(tmp_path, limit=1000).packed is None
