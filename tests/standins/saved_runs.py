"""A real training script that saves, in processes forked from one that has torch already: a run takes a second.

The script is `tests/functional/train_exact.py` unless told otherwise; its ranks talk over gloo, and its checkpoints are
gpucloud.resume's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from gpucloud.resume.attempt import SAVED_AND_LEFT
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.restoring import Restored, find
from gpucloud.resume.save import agreement
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.checkpoints import Checkpoints
from tests.functional import train_exact
from tests.standins.ports import free_port

PREFIX = "jobs/saved/checkpoints"
_WITHIN_S = 120.0

Hook = Callable[[int], None]


@dataclass
class SavedRun:
    """One job's store and its results; `steps` in all, saved every `every` steps.

    `store` is the store's URL, a directory in the run's own folder if left out. `script` takes `--out` and `--steps`,
    and beside them `arguments`.
    """

    folder: Path
    ranks: int = 1
    steps: int = 6
    every: int = 2
    keep: int = 3
    store: str = ""
    script: Callable[[], Any] = train_exact.main
    arguments: tuple[str, ...] = ()
    attempts: int = field(default=0, init=False)

    @property
    def url(self) -> str:
        return self.store or str(self.folder / "store")

    def attempt(self, hook: Hook = lambda rank: None) -> list[int]:
        """Run the next attempt to its end and return the exit codes (−9: killed); `hook` is called in each rank.

        As the agent would, all ranks are ended as soon as one of them has failed.
        """
        return ended(self.start(hook))

    def start(self, hook: Hook = lambda rank: None) -> list[int]:
        """Start the next attempt and return its processes, one for each rank."""
        self.attempts += 1
        self.folder.mkdir(exist_ok=True)
        port = free_port()
        return [self._fork(rank, port, hook) for rank in range(self.ranks)]

    def digests(self) -> list[str]:
        """What each rank had at the end of the last attempt that came there: weights, losses, generators."""
        return [json.loads((self.folder / f"result-{r}.json").read_text())["digest"] for r in range(self.ranks)]

    def said(self, rank: int = 0) -> str:
        """What the rank wrote in the last attempt."""
        return (self.folder / f"log-{self.attempts}-{rank}").read_text()

    def restored(self, store: ObjectStore | None = None) -> Restored | None:
        """What a script that starts now would restore."""
        return restored(store or open_store(self.url))

    def _fork(self, rank: int, port: int, hook: Hook) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            self._prepare(rank, port)
            hook(rank)
            code = int(self.script() or 0)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001  a fork must not return to its caller's code
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _prepare(self, rank: int, port: int) -> None:
        agreement.LOOK_S = 0.0  # what a hook wishes at a step is heeded there
        log = os.open(self.folder / f"log-{self.attempts}-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["train_exact.py", "--out", str(self.folder), "--steps", str(self.steps), *self.arguments]
        attempt = self.folder / f"attempt-{self.attempts}-{rank}"
        attempt.mkdir()
        os.environ |= {
            "GPUCLOUD_STORE": self.url,
            "GPUCLOUD_CHECKPOINTS": PREFIX,
            "GPUCLOUD_ATTEMPT": str(self.attempts),
            "GPUCLOUD_ATTEMPT_DIR": str(attempt),
            "GPUCLOUD_CHECKPOINT_EVERY": f"steps:{self.every}",
            "GPUCLOUD_CHECKPOINT_KEEP": str(self.keep),
            "GPUCLOUD_RECIPE": "{}",  # as a launcher says that the script is as it was: its arguments name folders
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        if self.ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Make this process fit to be forked: what every run needs is imported, one thread, nothing to collect."""
    torch.set_num_threads(1)
    gc.freeze()
    yield


def restored(store: ObjectStore) -> Restored | None:
    """Return what a lone rank would restore from the store."""
    return find(Checkpoints(store, PREFIX, keep=3), Ranks())


def ended(children: list[int]) -> list[int]:
    """Return the exit codes of an attempt's processes; when one has failed, the others are ended."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _WITHIN_S
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        failed = any(code not in (0, SAVED_AND_LEFT) for code in codes.values())
        if failed or time.monotonic() > deadline:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[child] for child in children]
