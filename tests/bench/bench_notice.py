"""Measures a notice to a state nearly as large as the line to the store allows: `python -m tests.bench notice`.

`resume` says that a state is too large when the store would take more than the 90 s that a notice leaves for it. The
S3 is the strict emulated one, behind a line of BYTES_PER_S; the script is a process that trains beside. Three runs
share the machine: the notice comes while nothing is saved, or while a save is under way, and a state that is too large.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

from gpucloud.resume.save.saving import NOTICE_LEAVES_S
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from tests.bench.figures import figure
from tests.standins.narrow_line import narrow_line
from tests.standins.own_bucket import bucket

BYTES_PER_S = 4 << 20
LARGEST = BYTES_PER_S * NOTICE_LEAVES_S
SHARE, BEYOND = 0.85, 1.2  # of the largest
NOTICE = timedelta(seconds=120)
UNDER_WAY_S = 20.0
STEPS_LOST_LIMIT = 1.0

SCRIPT = """
import sys, time
import torch
from gpucloud import resume

model = torch.nn.ParameterList(torch.randn(1 << 20) for _ in range(int(float(sys.argv[1])) >> 22))
run = resume.init(model=model, total_steps=100_000)
while True:
    with torch.no_grad():
        model[run.steps_done % len(model)].add_(1)
    time.sleep(0.05)
    run.step()
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name, bucket(Path(name) / "s3") as url:
        with ThreadPoolExecutor() as pool:
            idle = pool.submit(_noticed, Path(name) / "idle", url, under_way=False)
            busy = pool.submit(_noticed, Path(name) / "busy", url, under_way=True)
            large = pool.submit(_too_large, Path(name) / "large", url)
        figure("notice_largest_mib", LARGEST / 2**20)
        figure("notice_state_mib", LARGEST * SHARE / 2**20)
        kept = [
            figure("notice_to_commit_s", idle.result().seconds, NOTICE_LEAVES_S),
            figure("notice_steps_lost", idle.result().lost, STEPS_LOST_LIMIT),
            figure("notice_to_commit_with_a_save_under_way_s", busy.result().seconds, NOTICE_LEAVES_S),
            figure("notice_steps_lost_with_a_save_under_way", busy.result().lost, STEPS_LOST_LIMIT),
            figure("notice_warned_of_a_state_that_fits", idle.result().warned + busy.result().warned, 0),
            figure("notice_not_warned_of_one_that_does_not", 1 - large.result(), 0),
        ]
    return 0 if all(kept) else 1


@dataclass(frozen=True, slots=True)
class _Left:
    """How long after the notice the newest commit counted, how many steps it lacks, and whether there was a warning."""

    seconds: float
    lost: int
    warned: int


def _noticed(folder: Path, url: str, *, under_way: bool) -> _Left:
    with _running(folder, url, LARGEST * SHARE) as script:
        script.wish()
        _until(script.committed)
        if under_way:
            script.wish()
            time.sleep(UNDER_WAY_S)
        before = script.committed()
        at = time.monotonic()
        script.notice()
        done = script.step()
        _until(lambda: script.committed() > before)
        seconds = time.monotonic() - at
        script.process.wait(NOTICE.total_seconds())
        return _Left(seconds, max(0, done - script.committed()), int(script.warned))


def _too_large(folder: Path, url: str) -> int:
    with _running(folder, url, LARGEST * BEYOND) as script:
        script.wish()
        _until(script.committed)
        _until(lambda: script.warned)
        return int(script.warned)


class _Script:
    """The training as a process, and the files in which a node's agent talks to it."""

    def __init__(self, folder: Path, environment: dict[str, str], size: float) -> None:
        self._attempt = folder / "attempt"
        self._attempt.mkdir(parents=True)
        self._story = folder / "story"
        prefix = f"jobs/{folder.name}/checkpoints"
        self._checkpoints = Checkpoints(open_store(environment["STORE"]), prefix, keep=3)
        own = {
            "GPUCLOUD_STORE": environment["STORE"],
            "GPUCLOUD_CHECKPOINTS": prefix,
            "GPUCLOUD_ATTEMPT_DIR": str(self._attempt),
            "GPUCLOUD_CHECKPOINT_EVERY": "steps:1000000",
        }
        with self._story.open("w") as story:
            self.process = subprocess.Popen(
                (sys.executable, "-c", SCRIPT, str(size)), env={**environment, **own}, stderr=story
            )

    @property
    def warned(self) -> bool:
        return "when a machine is interrupted" in self._story.read_text()

    def step(self) -> int:
        """Return how many steps are done by the newest report, 0 before there is one."""
        if self.process.poll() not in (None, 75):
            raise RuntimeError(self._story.read_text())
        with contextlib.suppress(FileNotFoundError):
            return int(json.loads((self._attempt / "progress.json").read_text())["step"] or 0)
        return 0

    def committed(self) -> int:
        """Return the newest step that the store has, 0 before there is one."""
        return max((manifest.commit.step for manifest in self._checkpoints.candidates()), default=0)

    def wish(self) -> None:
        self._write("save.json", {"since": time.time()})

    def notice(self) -> None:
        self._write("stop.json", {"reason": "notice", "at": (datetime.now(timezone.utc) + NOTICE).isoformat()})

    def _write(self, name: str, content: dict[str, object]) -> None:
        beside = self._attempt / f".{name}"
        beside.write_text(json.dumps(content))
        beside.replace(self._attempt / name)


@contextlib.contextmanager
def _running(folder: Path, url: str, size: float) -> Iterator[_Script]:
    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with narrow_line(port, BYTES_PER_S) as line:
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line}", "STORE": url}
        script = _Script(folder, {**os.environ, **endpoint}, size)
        try:
            _until(script.step)
            yield script
        finally:
            script.process.kill()
            script.process.wait()


def _until(holds: Callable[[], object], limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
