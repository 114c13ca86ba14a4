"""A script on several nodes, each with a disk of its own, that writes its part of each save: real processes, one store.

The keeper of each node is started as the node's agent would do it; there is no node, no network and no launcher.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpucloud.agent.attempt.composing import MARK
from gpucloud.domain.checkpoint.directory import files_apart
from gpucloud.domain.checkpoint.layouts import KeepOrder, Rule
from gpucloud.domain.checkpoint.manifest import Manifest
from gpucloud.domain.codec import to_json
from gpucloud.domain.job.spec import Layout, OnNotice
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.system import processes
from tests.standins.kept_script import KEEP, PREFIX, ROOT
from tests.standins.ports import free_port

# As torch.distributed.checkpoint does: every rank its own file, a barrier, then rank 0 the names of all, in a pickle.
# Or as Trainer does: no barrier, every rank its random state, rank 0 the rest. Each file says its step.
SCRIPT = r"""
import json, os, pickle, re, signal, sys, time
kind, total, pause, barriers, world = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
rank, asked = int(os.environ["RANK"]), []
if "on" in os.environ:
    signal.signal(getattr(signal, os.environ["on"]), lambda *_: asked.append(True))
prefix = "step" if kind == "dcp" else "checkpoint"

def barrier(name):
    open(f"{barriers}/{name}-{rank}", "w").close()
    while not all(os.path.exists(f"{barriers}/{name}-{one}") for one in range(world)):
        time.sleep(0.005)

def slowly(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", buffering=1) as file:
        for at in range(0, len(text), 2000):
            file.write(text[at : at + 2000])
            file.flush()
            time.sleep(pause)

def save(step):
    folder, text = f"out/{prefix}-{step}", json.dumps({"step": step, "rank": rank, "pad": "x" * 6000})
    if kind == "dcp":
        slowly(f"{folder}/__{rank}_0.distcp", text)
        barrier(f"save-{step}")
        if rank == 0:
            with open(f"{folder}/.new", "wb") as file:
                pickle.dump([f"__{one}_0.distcp" for one in range(world)], file)
            os.rename(f"{folder}/.new", f"{folder}/.metadata")
        return
    if rank == 0:
        slowly(f"{folder}/trainer_state.json", text)
    else:
        time.sleep(5 * pause)
    slowly(f"{folder}/rng_state_{rank}.pth", text)

def newest():
    names = os.listdir("out") if os.path.isdir("out") else []
    steps = [int(m[1]) for m in map(re.compile(prefix + r"-(\d+)$").match, names) if m]
    for step in sorted(steps)[-1:]:
        folder = f"out/{prefix}-{step}"
        names = pickle.load(open(f"{folder}/.metadata", "rb")) if kind == "dcp" else [
            "trainer_state.json", *(f"rng_state_{one}.pth" for one in range(world))]
        assert {json.load(open(f"{folder}/{name}"))["step"] for name in names} == {step}
        return step
    return 0

def committed():
    try:
        with open(os.environ["waits_for"]) as file:
            return json.load(file)["committed_step"] or 0
    except FileNotFoundError:
        return 0

step = newest()
print("begins at", step, flush=True)
while step < total:
    step += 1
    time.sleep(pause)
    barrier(f"step-{step}")
    if asked and step % 10 != 0:  # all are asked within one step of ten
        continue
    if step % 10 == 0:
        save(step)
        if asked:
            sys.exit(0)
        while rank == 0 and "waits_for" in os.environ and committed() < step:  # and the others for rank 0
            time.sleep(0.01)
"""


class KeptNodes:
    """Attempts of one script on `nodes` nodes of one rank each; `program` is its text, `kind` its first argument."""

    def __init__(
        self, folder: Path, *, kind: str = "dcp", nodes: int = 2, settle_s: float = 0.1, program: str = SCRIPT
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.program = program
        self.port = 0
        self.nodes = nodes
        self.settle_s = settle_s
        self.attempts = 0
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def code(self, node: int) -> Path:
        return self.folder / f"node-{node}" / "code"

    def attempt_folder(self, node: int) -> Path:
        return self.folder / f"node-{node}" / f"attempt-{self.attempts}"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(open_store(str(self.folder / "store")), PREFIX, keep=KEEP)

    def start(self, *, steps: int, pause_s: float = 0.005, on: OnNotice = OnNotice.NONE, waits: bool = False) -> None:
        """Start the next attempt on every node. With `waits` it goes on after a save when that is committed."""
        self.attempts += 1
        self.port = free_port()
        for node in range(self.nodes):
            self.processes[node] = self._started(node, steps, pause_s, on, waits=waits)

    def ended(self, limit_s: float = 240.0) -> list[int]:
        """Return the exit codes once the attempt is over on every node."""
        return [self.processes[node].wait(limit_s) for node in range(self.nodes)]

    def is_over(self) -> bool:
        """Whether the attempt has ended on some node."""
        return any(process.poll() is not None for process in self.processes.values())

    def ask_to_stop(self, within_s: float = 60.0) -> None:
        at = datetime.now(timezone.utc) + timedelta(seconds=within_s)
        for node in range(self.nodes):
            beside = self.attempt_folder(node) / ".stop"
            beside.write_text(json.dumps({"reason": "notice", "at": at.isoformat()}))
            beside.replace(self.attempt_folder(node) / "stop.json")

    def kill(self, *nodes: int) -> None:
        """SIGKILL keeper and script of these nodes; without any, of all."""
        for node in nodes or range(self.nodes):
            if node in self.processes:
                processes.kill_below(self.processes[node].pid, mark=(MARK, str(self.attempt_folder(node))))
                self.processes[node].kill()
                self.processes[node].wait()

    def lose_the_disk(self, node: int) -> None:
        subprocess.run(["rm", "-rf", *(str(self.code(node) / name) for name in ("out", ".gpucloud-kept"))], check=True)

    def said(self, node: int) -> str:
        return (self.attempt_folder(node) / f"rank-{node}.log").read_text()

    def begun_at(self) -> list[int]:
        """Return the step at which each node's script began in this attempt."""
        return [int(re.findall(r"begins at (\d+)", self.said(node))[-1]) for node in range(self.nodes)]

    def committed(self) -> tuple[Manifest, ...]:
        """The manifests, the newest first."""
        return tuple(self.checkpoints.candidates())

    def wrong(self) -> str | None:
        """Say which commit lacks a node's part, or mixes steps; None when all are whole."""
        ranks = range(self.nodes)
        folder, wanted = ("step", {".metadata", *(f"__{one}_0.distcp" for one in ranks)})
        if self.kind != "dcp":
            folder, wanted = ("checkpoint", {"trainer_state.json", *(f"rng_state_{one}.pth" for one in ranks)})
        for manifest in self.committed():
            files, objects = files_apart(manifest) or (), self.checkpoints.fetch(manifest) or ()
            by_key = dict(zip((piece.key for piece in manifest.pieces), objects, strict=False))
            found = {path: by_key.get(piece.key, b"") for path, piece in files}
            if set(found) != {f"{folder}-{manifest.commit.step}/{name}" for name in wanted}:
                return f"{manifest.commit} has {sorted(found)}"
            texts = [data for path, data in found.items() if not path.endswith(".metadata")]
            if {json.loads(data)["step"] for data in texts} != {manifest.commit.step}:
                return f"{manifest.commit} mixes steps"
        return None

    def _started(self, node: int, steps: int, pause_s: float, on: OnNotice, *, waits: bool) -> subprocess.Popen[bytes]:
        folder, code = self.attempt_folder(node), self.code(node)
        for made in (folder, code, barriers := self.folder / f"barriers-{self.attempts}"):
            made.mkdir(parents=True, exist_ok=True)
        (code / "train.py").write_text(self.program)
        layout = Layout.DCP if self.kind == "dcp" else Layout.AUTO
        order = KeepOrder(
            code=str(code),
            directory=str(code / "out"),
            rule=Rule(layout=layout, ranks=1, nodes=self.nodes, per_node=self.nodes > 1, node=node),
            on_notice=on,
            settle=timedelta(seconds=self.settle_s),
            store=str(self.folder / "store"),
            prefix=PREFIX,
            attempt=self.attempts,
            keep=KEEP,
            rank=node,
            folder=str(folder),
            first_rank=node,
        )
        own = {"PYTHONPATH": str(ROOT), MARK: str(folder), "RANK": str(node), "WORLD_SIZE": str(self.nodes)}
        own |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        if waits:
            own["waits_for"] = str(self.attempt_folder(0) / "progress.json")
        with (folder / f"rank-{node}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gpucloud.agent", "keep", "--order", to_json(order), "--",
                 sys.executable, "train.py", self.kind, str(steps), str(pause_s), str(barriers), str(self.nodes)],
                cwd=code, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | own | ({} if on is OnNotice.NONE else {"on": on.value}),
            )  # fmt: skip
