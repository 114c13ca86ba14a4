""".ci/run executes README's own words, says when each phase began, and ends what they leave running."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpucloud.system import processes

ROOT = Path(__file__).resolve().parents[2]
README = """# Title

```python
ignored()
```

```sh
{first}
```

text

```sh
{second}
```

```sh
echo third
```
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "gpucloud" / "system").mkdir(parents=True)
    for name in ("__init__.py", "system/__init__.py", "system/processes.py"):
        shutil.copy(ROOT / "gpucloud" / name, tmp_path / "gpucloud" / name)
    (tmp_path / ".ci").mkdir()
    for name in ("run", "within.py"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci" / name)
    shim = tmp_path / "python-without-pip"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --without-pip\n')
    shim.chmod(0o700)
    return tmp_path


def ci(checkout: Path, first: str, second: str, **env: str) -> subprocess.CompletedProcess[str]:
    (checkout / "README.md").write_text(README.format(first=first, second=second))
    return subprocess.run(
        [checkout / ".ci" / "run"],
        env={**os.environ, "TMPDIR": str(checkout), "PYTHON": str(checkout / "python-without-pip"), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )


def test_both_blocks_run_in_a_fresh_environment(checkout: Path) -> None:
    done = ci(checkout, "which python\ntouch one", "test -e one\necho second")
    assert done.returncode == 0, done.stdout
    assert f"{checkout}/.ci/venv/bin/python" in done.stdout
    assert "ignored" not in done.stdout
    assert "third" not in done.stdout
    limit = re.search(r"GPUCLOUD_CI_SECOND_S:-(\d+)", (ROOT / ".ci" / "run").read_text())[1]
    phases = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    assert phases == [
        "making .ci/venv",
        "block 1 begins (limit 420s)",
        "block 1 done",
        f"block 2 begins (limit {limit}s)",
        "block 2 done",
        "everything passed",
    ]


def test_the_first_failure_ends_it(checkout: Path) -> None:
    done = ci(checkout, "(exit 7)\necho not reached", "echo second")
    assert done.returncode == 7
    assert "not reached" not in done.stdout.replace("echo not reached", "")
    assert "block 2" not in done.stdout


def test_a_block_that_hangs_is_ended_with_its_daemons(checkout: Path) -> None:
    pid = checkout / "pid"
    done = ci(checkout, f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' &\nsleep 600", "", GPUCLOUD_CI_FIRST_S="2")
    assert done.returncode == 124, done.stdout
    assert processes.started(int(pid.read_text())) is None
    assert list(checkout.glob("gpucloud-ci.*")) == []


def test_a_readme_without_blocks_fails(checkout: Path) -> None:
    done = ci(checkout, "", "true")
    assert done.returncode == 1
    assert "README.md has no sh block number 1" in done.stdout
