"""The group by which ranks talk beside their training ends with the run, and no thread of it outlives that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
from gpucloud.resume.ranks import Ranks

def threads():
    return {path.name for path in Path("/proc/self/task").iterdir()}

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
before = threads()
ranks = Ranks()
ranks.group = dist.new_group(backend="gloo")
kept = ranks.comparison(1)
assert kept.begun((3,)).highest() == (3,)
assert threads() - before
ranks.close()
assert not threads() - before
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux lists them")
def test_no_thread_of_the_side_group_outlives_the_run(tmp_path: Path) -> None:
    """One that let go of a number while the interpreter ended aborted a process that had trained to its end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
