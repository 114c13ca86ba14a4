"""A node's own bootstrap in a group that its login got since: by the genuine `sg`, in a space with its own groups."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Mounts are this space's own: nobody else on the machine sees the group.
IN_SPACE = (
    'mount --bind "$1" /etc/group && { [ ! -e /etc/gshadow ] || mount --bind "$2" /etc/gshadow; } && exec "$3" -c "$4"'
)
PROGRAM = """
import json, os, time
from pathlib import Path
from gpucloud.agent.boot import ThisHost
from gpucloud.domain.errors import NodeError
host = ThisHost(Path.home() / ".gpucloud")
groups = lambda: host.run(("id", "-Gn")).stdout.decode().split()
said = {"before": groups()}
host.renew()
said["after"] = groups()
told = ("sh", "-c", "printf '%s|' \\"$@\\"; cat; exit 7", "x", "a b", "$HOME", "it's", "\\\\n")
done = host.run(told, stdin=b"given")
said["ran"] = [done.exit_code, done.stdout.decode(), done.stderr.decode()]
said["token"] = host.run(("printenv", "TOKEN")).stdout.decode().strip()
try:
    host.run(("sh", "-c", "echo $$ >pid; exec sleep 600"), timeout_s=1.0)
except NodeError as error:
    said["late"] = error.message
def lives():
    try:
        state = Path("/proc", Path("pid").read_text().strip(), "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")
until = time.monotonic() + 20  # the whole group is killed; only its leader is waited for
while lives() and time.monotonic() < until:
    time.sleep(0.05)
said["lives"] = lives()
print(json.dumps(said))
"""


def in_space(tmp_path: Path) -> dict[str, Any]:
    """Run the program where this login is in the group `docker`, which this process is not."""
    for program, package in (("sg", "login"), ("unshare", "util-linux")):
        assert shutil.which(program) is not None, f"apt install {package}"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may make no space of its own for mounts here")
    for name, line in (("group", "docker:x:4243:root\n"), ("gshadow", "docker:!::root\n")):
        there = Path("/etc", name)
        text = there.read_text() if there.exists() else ""
        kept = [one for one in text.splitlines(keepends=True) if not one.startswith("docker:")]
        (tmp_path / name).write_text("".join([*kept, line]))
    argv = ["unshare", "--mount", "sh", "-c", IN_SPACE, "sh", tmp_path / "group", tmp_path / "gshadow", sys.executable]
    env = {**os.environ, "HOME": str(tmp_path), "TOKEN": "a b", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([*argv, PROGRAM], capture_output=True, env=env, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_commands_run_in_a_group_that_the_login_got_since_as_they_run_without(tmp_path: Path) -> None:
    said = in_space(tmp_path)
    assert "docker" not in said["before"]
    assert "docker" in said["after"]
    assert said["ran"] == [7, "a b|$HOME|it's|\\n|given", ""]
    assert said["token"] == "a b"  # variables travel on
    assert said["late"] == "`sh -c echo $$ >pid; exec sleep 600` did not end within 1 s"
    assert said["lives"] is False
