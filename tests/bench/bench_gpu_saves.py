"""Measures on GPUs what saving costs, and whether what is resumed is the same: `python -m tests.bench.bench_gpu_saves`.

It needs torch alone, and a folder in memory (`--folder`, else the temporary one) with room for four states, so that no
disk is measured. `--run="--layers 9 --batch 16"` gives one GPU as much to compute and to save as each of two has of the
whole. First jobs over NCCL that are killed at random and must end with the same bits; then a GPT with 834 M
parameters: the copy, the throughput with and without saves in turns, torch.save and dcp.save beside, and the load. With
--tiny everything is small: without GPUs (over gloo) this shows that it works, and no more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench.figures import figure

ROOT = Path(__file__).resolve().parents[2]
COPY_STEPS_LIMIT = 0.05
SLOWDOWN_LIMIT = 1 / 0.998
EXCESS_LIMIT = 0.2
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t from 1 to 10 degrees of freedom; of more, that of 10 is a little too wide."""
KILLS, JOBS_AT_ONCE, JOB_LIMIT_S = 10, 12, 100
AFTERWARDS_S = 60.0  # what the load takes, and the torch.save and dcp.save before it
PARTS = ("state", "copy", "block", "other", "saved", "loaded")
Found = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is."""

    job: str
    steps: int
    run: str


WHOLE = Scale(job="--width 256 --layers 8 --batch 4 --length 256", steps=240, run="")
TINY = Scale(
    job="--width 64 --layers 1 --batch 1 --length 32",
    steps=60,
    run="--width 64 --layers 1 --batch 1 --length 32 --block 40 --rounds 2 --copies 3",
)


def main() -> int:
    args = _arguments()
    until = time.time() + args.seconds
    import torch  # noqa: PLC0415  the driver itself needs it for this alone

    world = args.ranks or torch.cuda.device_count() or 2
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    print(f"{world} × {name}, torch {torch.__version__}", flush=True)
    scale = TINY if args.tiny else WHOLE
    good = True
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="saves-") as folder:
        if args.part != "cost":
            good &= exactness(Path(folder), world, scale, args.kills)
        if args.part != "exact":
            good &= cost(Path(folder), world, replace(scale, run=f"{scale.run} {args.run}"), until)
    return 0 if good else 1


def exactness(folder: Path, world: int, scale: Scale, kills: int) -> bool:
    """An undisturbed job, twice, and one for each kill; deterministic kernels."""
    jobs = [Job(folder / f"job-{n}", world, scale, seed=n if n > 1 else None) for n in range(kills + 2)]
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        first, second, *cut = pool.map(Job.hash, jobs)
    for number, (job, ended) in enumerate(zip(jobs[2:], cut, strict=True)):
        print(f"kill {number}: {job.story} {'equal' if ended == first else 'DIFFERS'}", flush=True)
    resumed = sum("resumed from step" in job.story for job in jobs[2:])
    kept = figure("gpu_saves_same_run_twice_differs", float(first is None or first != second), 0)
    kept &= figure("gpu_saves_kills_that_were_not_resumed", kills - resumed, 0)
    return figure("gpu_saves_resumed_runs_that_differ", sum(ended != first for ended in cut), 0) and kept


class Job:
    """One job under torchrun that saves every 20 steps; with a seed, all of it is killed once at a random moment."""

    def __init__(self, folder: Path, world: int, scale: Scale, seed: int | None) -> None:
        self.story = ""
        self._folder = folder
        self._world = world
        self._scale = scale
        self._dice = random.Random(seed) if seed is not None else None

    def hash(self) -> str | None:
        """Return the hash of the state that the job ends with; None when it does not."""
        if self._dice is not None:
            self._attempt(kill_at=self._dice.randrange(25, self._scale.steps - 20), wait_s=self._dice.uniform(0, 0.2))
        output = self._attempt()
        shutil.rmtree(self._folder)
        m = re.search(r"state sha256 (\w+)", output)
        return m[1] if m else None

    def _attempt(self, kill_at: int | None = None, wait_s: float = 0.0) -> str:
        attempt = self._folder / ("killed" if kill_at else "whole")
        attempt.mkdir(parents=True)
        arguments = f"--exact --steps {self._scale.steps} {self._scale.job}".split()
        saving = {"GPUCLOUD_STORE": str(self._folder / "store"), "GPUCLOUD_ATTEMPT_DIR": str(attempt)}
        saving |= {"GPUCLOUD_CHECKPOINT_EVERY": "steps:20", "GPUCLOUD_CHECKPOINT_KEEP": "2"}
        with _torchrun(self._world, "tests.bench.gpu.train", arguments, saving) as ranks:
            if kill_at is not None:
                self._kill(ranks, attempt, kill_at, wait_s)
            output = _output(ranks, JOB_LIMIT_S)
        resumed = re.search(r"resumed from step \d+, \w+", output)
        if kill_at is None:
            self.story += f"{resumed[0] if resumed else ''} {'' if ranks.returncode == 0 else output[-2000:]}"
        return output

    def _kill(self, ranks: subprocess.Popen[str], attempt: Path, step: int, wait_s: float) -> None:
        deadline = time.monotonic() + JOB_LIMIT_S
        while ranks.poll() is None and _step(attempt) < step and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(wait_s)
        at = _step(attempt)
        _end(ranks)
        self.story = f"killed after step {at}"


def cost(folder: Path, world: int, scale: Scale, until: float) -> bool:
    """The large model."""
    arguments = ["--folder", str(folder / "run"), *scale.run.split()]
    measuring = f"--until {until - AFTERWARDS_S}".split()
    found = _measured(world, [*arguments, *measuring], until - time.time())
    loaded = _measured(world, [*arguments, "--resume"], until - time.time())
    by = {what: [one for one in [*found, *loaded] if one["what"] == what] for what in PARTS}
    kept = [figure("gpu_saves_parts_that_failed", sum(not by[what] for what in PARTS), 0)]
    for one in by["state"]:
        figure("gpu_saves_state_gb", one["gigabytes"])
    if by["copy"]:
        kept.append(_copy_told(by["copy"]))
    if by["block"]:
        kept.append(_throughput_told(by["block"]))
        kept.append(_excess_told(by["block"]))
    for way in ("torch_save", "dcp_save"):
        tries = [one for one in by["other"] if one["way"] == way]
        if tries:
            figure(f"gpu_saves_{way}_s", min(one["seconds"] for one in tries))
            figure(f"gpu_saves_{way}_steps", min(one["seconds"] / one["usual_s"] for one in tries))
    for saved, one in zip(by["saved"], by["loaded"], strict=False):
        figure("gpu_saves_load_s", one["init_s"])
        figure("gpu_saves_load_gb_per_s", one["bytes"] / 1e9 / one["init_s"])
        wrong = (one["bits"], one["step"]) != (saved["bits"], saved["step"])
        kept.append(figure("gpu_saves_loaded_states_that_differ", float(wrong), 0))
    return all(kept)


def _copy_told(copies: Found) -> bool:
    """What the step after a save took more than steps do, as a share of one; the first two of a run settle it."""
    settled = copies[2:] or copies
    over = [one["saving_s"] - one["usual_s"] for one in settled]
    usual_s = statistics.median(one["usual_s"] for one in settled)
    figure("gpu_saves_step_ms", 1000 * usual_s)
    figure("gpu_saves_call_ms", 1000 * statistics.median(one["call_s"] for one in settled))
    figure("gpu_saves_copy_ms", 1000 * statistics.median(over))
    figure("gpu_saves_copy_worst_steps", max(over) / usual_s)
    figure("gpu_saves_step_after_steps", statistics.median(one["after_s"] for one in settled) / usual_s - 1)
    return figure("gpu_saves_copy_steps", statistics.median(over) / usual_s, COPY_STEPS_LIMIT)


def _throughput_told(blocks: Found) -> bool:
    """The first round settles the machine. Each round compares neighbours; the sum over all is told beside."""
    rounds = [blocks[at : at + 3] for at in range(3, len(blocks) - 2, 3)] or [blocks[:3]]
    ratios: dict[str, list[float]] = {"stepping": [], "saving": []}
    for one in rounds:
        seconds = {block["kind"]: block["seconds"] for block in one}
        for kind, found in ratios.items():
            found.append(seconds[kind] / seconds["plain"])
    for kind in ("plain", "stepping", "saving"):
        taken = [block["seconds"] for one in rounds for block in one if block["kind"] == kind]
        figure(f"gpu_saves_block_{kind}_s", statistics.median(taken))
        figure(f"gpu_saves_block_{kind}_spread", max(taken) / min(taken))
    figure("gpu_saves_rounds", len(rounds))
    figure("gpu_saves_slowdown_by_step_alone", statistics.median(ratios["stepping"]))
    figure("gpu_saves_slowdown_worst_round", max(ratios["saving"]))
    late = sum(not block["over"] for one in rounds for block in one)
    kept = figure("gpu_saves_not_committed_within_their_block", late, 0)
    return figure("gpu_saves_slowdown", statistics.median(ratios["saving"]), SLOWDOWN_LIMIT) and kept


def _excess_told(blocks: Found) -> bool:
    """The mean over the blocks after the first round, with its interval; beside it that of blocks without a save."""
    found = {kind: [one["excess"] for one in blocks[3:] if one["kind"] == kind] for kind in ("stepping", "saving")}
    of = {kind: [100 * value for value in some if value is not None] for kind, some in found.items()}
    figure("gpu_saves_steps_until_commit", statistics.median(one["span"] for one in blocks if one["kind"] == "saving"))
    for kind, name in {"stepping": "without_save_", "saving": ""}.items():
        if len(of[kind]) > 1:
            low, high = _interval(of[kind])
            figure(f"gpu_saves_excess_{name}low_percent", low)
            figure(f"gpu_saves_excess_{name}high_percent", high)
    if of["stepping"]:
        figure("gpu_saves_excess_without_save_percent", statistics.mean(of["stepping"]))
    return bool(of["saving"]) and figure("gpu_saves_excess_percent", statistics.mean(of["saving"]), EXCESS_LIMIT)


def _interval(values: list[float]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval of their mean."""
    half = STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def _measured(world: int, arguments: list[str], limit_s: float) -> Found:
    with _torchrun(world, "tests.bench.gpu.saves", arguments, {}) as ranks:
        output = _output(ranks, limit_s, echo=True)
    if ranks.returncode:
        print(f"failed ({ranks.returncode}): {output[-3000:]}", flush=True)
    return [json.loads(line) for line in re.findall(r"^MEASURED (.*)$", output, re.MULTILINE)]


@contextmanager
def _torchrun(world: int, module: str, arguments: list[str], more: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", module]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}
    with subprocess.Popen(
        [*argv, *arguments],
        env=env,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as ranks:
        try:
            yield ranks
        finally:
            _end(ranks)


def _output(ranks: subprocess.Popen[str], limit_s: float, *, echo: bool = False) -> str:
    """Return what was printed until the end, which comes after `limit_s` at the latest."""
    assert ranks.stdout is not None
    late = threading.Timer(max(1.0, limit_s), _end, [ranks])
    late.daemon = True
    late.start()
    lines = []
    for line in ranks.stdout:
        lines.append(line)
        if echo and line.startswith(("MEASURED", "gpucloud:")):
            print(line, end="", flush=True)
    late.cancel()
    ranks.wait()
    return "".join(lines)


def _end(ranks: subprocess.Popen[str]) -> None:
    """Kill torchrun with all ranks and what they started; each rank has a session of its own."""
    if ranks.poll() is None:
        for pid in (ranks.pid, *_below(ranks.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _below(parent: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(status.read_text().rpartition(")")[2].split()[1]), []).append(
                int(status.parent.name)
            )
    found, rest = [], [parent]
    while rest:
        of = children.get(rest.pop(), [])
        found += of
        rest += of
    return found


def _step(attempt: Path) -> int:
    try:
        return int(json.loads((attempt / "progress.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what saving costs on GPUs.")
    parser.add_argument("--ranks", type=int, default=0, help="else as many as there are GPUs")
    parser.add_argument("--folder", help="in memory, with room for four states")
    parser.add_argument("--seconds", type=float, default=480, help="that all of it may take")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--part", choices=("all", "exact", "cost"), default="all")
    parser.add_argument("--run", default="", help="what tests.bench.gpu.saves is to be given, as one word")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("bench_gpu_saves.py") else [])


if __name__ == "__main__":
    sys.exit(main())
