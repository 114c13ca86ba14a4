"""A script that saves by itself, slowly, and the node's keeper of its directory, as real processes without a node."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpucloud.agent.attempt.composing import MARK
from gpucloud.agent.attempt.files import AttemptFolder
from gpucloud.agent.scripts.script import is_whole
from gpucloud.domain.checkpoint.directory import paths_of
from gpucloud.domain.checkpoint.layouts import Additions, KeepOrder, Rule
from gpucloud.domain.checkpoint.manifest import Manifest
from gpucloud.domain.codec import to_json
from gpucloud.domain.job.spec import OnNotice
from gpucloud.domain.node.status import Outcome, Progress
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.system import processes

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "jobs/x/checkpoints"
KEEP = 100

# Writes what torch.save would write (a zip whose directory comes last), in pieces with pauses between them. Every file
# of a save says its step, so that a mixture of two saves is noticed.
SCRIPT = '''
import io, json, os, signal, sys, time, zipfile
kind, total, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def zipped(step):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("step", str(step) + " " * 20000)
    return out.getvalue()

if kind == "torch":
    import torch

    def zipped(step):
        out = io.BytesIO()
        torch.save({"model": torch.nn.Linear(9, 9).state_dict(), "iter_num": step, "config": {"iter_num": 10**6}}, out)
        return out.getvalue()

def slowly(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), 4096):
            file.write(data[at : at + 4096])
            time.sleep(pause)

def names():
    return [os.path.join(folder, name) for folder, _, found in os.walk("out") for name in found]

def newest():
    """As such scripts do: the highest number, whatever is in it."""
    if kind == "file":
        found = [path for path in names() if path == "out/ckpt.pt"]
    else:
        folders = os.listdir("out") if os.path.isdir("out") else []
        folders.sort(key=lambda name: int(name.rpartition("-")[2]))
        found = [f"out/{name}/a.pt" for name in folders[-1:]]
    if not found:
        return 0
    with zipfile.ZipFile(found[0]) as archive:
        return int(archive.read("step"))

def save(step):
    folder = f"out/checkpoint-{step}"
    if kind in ("file", "torch"):
        slowly("out/ckpt.pt", zipped(step))
        return
    for name in ("a.pt", "b.pt", "c.pt"):
        slowly(f"{folder}/{name}", zipped(step))
    if kind == "hf":
        slowly(f"{folder}/trainer_state.json", json.dumps({"global_step": step, "log": "x" * 9000}).encode())
    else:
        with open(f"{folder}/DONE", "w") as file:
            file.write(json.dumps({"global_step": step}))

def committed():
    """The step, or the save, that the keeper tells of."""
    try:
        with open(os.environ["waits_for"]) as file:
            return json.load(file)["committed_step"] or 0
    except FileNotFoundError:
        return 0

asked = []
if "on" in os.environ:
    ignored = os.environ["handler"] == "ignore"
    signal.signal(getattr(signal, os.environ["on"]), signal.SIG_IGN if ignored else lambda *_: asked.append(True))
print("words", *sys.argv[4:], os.environ.get("RESUME_FROM", ""), flush=True)
step = 0 if os.environ.get("from_scratch") == "1" and "--resume" not in sys.argv else newest()
print("begins at", step, flush=True)
while step < total:
    step += 1
    time.sleep(pause)
    if asked:
        save(step)
        print("saved when asked", step, flush=True)
        if os.environ["on"] == "SIGUSR1":
            time.sleep(60)
        sys.exit(0)
    if step % 10 == 0:
        before = committed() if "waits_for" in os.environ else None
        save(step)
        print("saved", step, flush=True)
        while "waits_for" in os.environ and committed() == before:
            time.sleep(0.01)
    if os.environ.get("hangs_at") == str(step):
        time.sleep(600)
exec(os.environ.get("then", ""))
if "exit" in os.environ:
    sys.exit(int(os.environ["exit"]))
'''


class KeptScript:
    """Attempts of one script on one node, in `folder`; the store is in it too."""

    def __init__(self, folder: Path, *, kind: str = "file", rule: Rule | None = None, settle_s: float = 0.1) -> None:
        self.folder = folder
        self.kind = kind
        self.code = folder / "code"
        self.out = self.code / "out"
        self.rule = rule or (Rule(done_file="DONE") if kind == "done" else Rule())
        self.settle_s = settle_s
        self.attempts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.code.mkdir(parents=True, exist_ok=True)
        (self.code / "train.py").write_text(SCRIPT)

    @property
    def attempt_folder(self) -> Path:
        return self.folder / f"attempt-{self.attempts}"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(open_store(str(self.folder / "store")), PREFIX, keep=KEEP)

    def start(
        self,
        *,
        steps: int = 30,
        pause_s: float = 0.005,
        on: OnNotice = OnNotice.NONE,
        handler: str = "save",
        keep: int = KEEP,
        waits: bool = False,
        additions: Additions = Additions(),  # noqa: B008  frozen
        upload: timedelta = timedelta(0),
        outputs: tuple[str, ...] = (),
        brings: bool = False,
        before: tuple[str, ...] = (),
        **env: object,
    ) -> None:
        """Start the next attempt; `handler` is what the script does about the signal: save, ignore, or none of it.

        The words `before` start it. With `from_scratch=1` it begins at 0, whatever is there, unless it is told
        `--resume`.
        With `waits` it goes on when its save is committed: else a newer one may come first, and it never is.
        """
        self.attempts += 1
        self.attempt_folder.mkdir()
        order = KeepOrder(
            code=str(self.code),
            directory=str(self.out),
            rule=self.rule,
            on_notice=on,
            settle=timedelta(seconds=self.settle_s),
            store=str(self.folder / "store"),
            prefix=PREFIX,
            attempt=self.attempts,
            keep=keep,
            rank=0,
            folder=str(self.attempt_folder),
            first_rank=0,
            additions=additions,
            upload=upload,
            outputs=outputs,
            brings=brings,
        )
        own = {name: str(value) for name, value in env.items()}
        if waits:
            own["waits_for"] = str(self.attempt_folder / "progress.json")
        if on is not OnNotice.NONE and handler != "none":
            own |= {"on": on.value, "handler": handler}
        with (self.attempt_folder / "rank-0.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpucloud.agent", "keep", "--order", to_json(order), "--",
                 *before, sys.executable, "train.py", self.kind, str(steps), str(pause_s)],
                cwd=self.code, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": str(ROOT), MARK: str(self.attempt_folder), "RANK": "0"} | own,
            )  # fmt: skip

    def ended(self, limit_s: float = 60.0) -> int:
        """Return the attempt's exit code once it is over."""
        assert self.process is not None
        return self.process.wait(limit_s)

    def ask_to_stop(self, within_s: float = 60.0) -> None:
        at = datetime.now(timezone.utc) + timedelta(seconds=within_s)
        beside = self.attempt_folder / ".stop"
        beside.write_text(json.dumps({"reason": "notice", "at": at.isoformat()}))
        beside.replace(self.attempt_folder / "stop.json")

    def kill_script(self) -> None:
        """SIGKILL the script alone."""
        assert self.process is not None
        for pid in processes.descendants(self.process.pid):
            _kill(pid)

    def kill(self) -> None:
        """SIGKILL the keeper and the script, as the loss of the node does."""
        if self.process is not None:
            below = processes.descendants(self.process.pid)
            self.process.kill()
            for pid in below:
                _kill(pid)
            self.process.wait()

    def kill_watcher(self, *, then_s: float) -> None:
        """SIGKILL the keeper alone; the script goes on for a while, then it is killed too."""
        assert self.process is not None
        below = processes.descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        time.sleep(then_s)
        for pid in below:
            _kill(pid)

    def lose_the_disk(self) -> None:
        """The next attempt is on another node: what was on this one is gone."""
        subprocess.run(["rm", "-rf", str(self.out), str(self.code / ".gpucloud-kept")], check=True)

    def said(self) -> str:
        return (self.attempt_folder / "rank-0.log").read_text()

    def committed(self) -> tuple[Manifest, ...]:
        """The manifests, the newest first."""
        return tuple(self.checkpoints.candidates())

    def step(self) -> int:
        """The step that rank 0's progress tells of."""
        try:
            return int(json.loads((self.attempt_folder / "progress.json").read_text())["committed_step"] or 0)
        except FileNotFoundError:
            return 0

    def told(self) -> Progress:
        """Return the attempt's progress, as the node's agent reads it."""
        progress = AttemptFolder(self.folder, self._linked()).progress()
        assert progress is not None
        return progress

    def _linked(self) -> int:
        """Return the attempt's number once its folder has the name by which agents know it."""
        with contextlib.suppress(FileExistsError):
            (self.folder / f"{self.attempts:04d}").symlink_to(self.attempt_folder)
        return self.attempts

    def outcome(self) -> Outcome:
        """Return how the attempt ended, as the node's agent judges it."""
        assert self.process is not None
        return AttemptFolder(self.folder, self._linked()).outcome((0,), self.process.wait(), killed=False)

    def newest_content(self) -> int:
        """The step that the files of the newest commit are of; 0 without one."""
        for manifest in self.committed():
            return max(step for step in self._steps(manifest).values() if step is not None)
        return 0

    def torn(self) -> list[str]:
        """The files in the directory that are not whole, and the saves that lack some."""
        files = [path for path in self.out.rglob("*") if path.is_file() and is_whole(path) is False]
        last = {"hf": "trainer_state.json", "done": "DONE"}.get(self.kind, "")
        halves = [path for path in self.out.glob("checkpoint-*") if last and not (path / last).exists()]
        return [str(path) for path in (*files, *halves)]

    def wrong(self) -> str | None:
        """Say which commit is not one whole save of the script; None when all are."""
        for manifest in self.committed():
            found = self._steps(manifest)
            names = {path.rpartition("/")[2] for path in found}
            last = {"hf": "trainer_state.json", "done": "DONE"}.get(self.kind)
            wanted = {"ckpt.pt"} if last is None else {"a.pt", "b.pt", "c.pt", last}
            if names != wanted or len(set(found.values())) != 1 or None in found.values():
                return f"{manifest.commit} is torn: {found}"
            if self.kind != "file" and {manifest.commit.step} != set(found.values()):
                return f"{manifest.commit} names another step than its files: {found}"
        return None

    def _steps(self, manifest: Manifest) -> dict[str, int | None]:
        """Return the step that each file is of; nothing when the checkpoint cannot be read."""
        paths, objects = paths_of(manifest), self.checkpoints.fetch(manifest)
        contents = zip(paths or (), objects or (), strict=True)
        return {path: _step_in(self.folder / "looked-at", path, data) for path, data in contents}


def _step_in(beside: Path, path: str, data: bytes) -> int | None:
    if path.endswith(".pt"):
        beside.with_suffix(".pt").write_bytes(data)
        if not is_whole(beside.with_suffix(".pt")):
            return None
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return int(archive.read("step"))
    try:
        return int(json.loads(data)["global_step"])
    except ValueError:
        return None


def until(holds: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
