"""Records a few steps of this rank by PyTorch's profiler, and marks the next few for Nsight Systems."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from gpucloud.domain.checkpoint.protection import LOSSES, Trial
from gpucloud.resume.folder import AttemptFolder, say
from gpucloud.system.wholefile import write_whole

WARM_UP = 3
"""Steps before the window: the first are slower than all that follow (allocator, cuDNN's choice, DDP's buckets)."""

_WARM = 1  # of them with the profiler on, or its own start would be in the window
_SHOWN = 10
_LOADING = "enumerate(DataLoader)"


class Profiling:
    """The windows of one rank: `steps` steps of PyTorch's profiler, then as many for nsys where it watches.

    Both read the GPU through CUPTI, which serves one at a time. Before and after, a step costs one comparison.
    """

    def __init__(self, folder: AttemptFolder, steps: int, rank: int) -> None:
        self.over = steps == 0 or folder.path is None
        self._folder = (folder.path or Path()) / "profile"
        self._steps = steps
        self._rank = rank
        self._done = 0
        self._profile: profile | None = None
        self._begun_at = 0.0
        self._window_s = 0.0

    def stepped(self) -> None:
        """A step is done: begin, go on or end."""
        if self.over:
            return
        self._done += 1
        if self._profile is not None:
            self._advance(self._profile)
        elif self._done == WARM_UP - _WARM:
            self._begin()
        if self._done == WARM_UP + self._steps and not _nsys_watches():
            self.over = True
        elif self._done == WARM_UP + self._steps:
            _nsys("cudaProfilerStart")
        elif self._done == WARM_UP + 2 * self._steps:
            _nsys("cudaProfilerStop")
            self.over = True

    def close(self) -> None:
        """The script ends: keep what was recorded."""
        if self.over:
            return
        self.over = True
        recorded = self._done - WARM_UP
        if self._profile is not None:
            self._window_s = self._window_s or time.perf_counter() - self._begun_at
            self._profile.stop()
        if recorded < self._steps and self._rank == 0:
            say(f"profile: the script ended after {max(0, recorded)} of {self._steps} steps, {WARM_UP} to warm up")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_WARM, active=self._steps, repeat=1),
            on_trace_ready=self._keep,
            acc_events=True,
        )
        self._profile.start()

    def _advance(self, recording: profile) -> None:
        if self._done == WARM_UP + self._steps:
            self._wait_for_gpu()
            self._window_s = time.perf_counter() - self._begun_at
        recording.step()  # the last one calls `_keep`
        if self._done == WARM_UP:
            self._begun_at = time.perf_counter()
        elif self._done == WARM_UP + self._steps:
            recording.stop()
            self._profile = None

    def _wait_for_gpu(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _keep(self, recording: profile) -> None:
        """Write the trace and its summary; a full disk must not end the training."""
        name = f"rank-{self._rank}"
        try:
            self._folder.mkdir(exist_ok=True)
            recording.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            write_whole(self._folder / f"{name}.summary.json", json.dumps(self._summary(recording)), mode=0o666)
        except OSError as error:
            say(f"profile: rank {self._rank}: {error}")

    def _summary(self, recording: profile) -> dict[str, Any]:
        averages = recording.key_averages()
        kernels = [average for average in averages if _is_kernel(average)]
        on_gpu = bool(kernels)
        steps = kernels or [average for average in averages if not average.key.startswith("ProfilerStep")]
        steps.sort(key=lambda a: a.self_device_time_total if on_gpu else a.self_cpu_time_total, reverse=True)
        loading = sum(a.cpu_time_total for a in averages if a.key.startswith(_LOADING)) / 1e6
        return {
            "version": 1,
            "rank": self._rank,
            "steps": min(self._steps, max(0, self._done - WARM_UP)),
            "seconds": self._window_s,
            "gpu_busy": self._busy(recording) if on_gpu else None,
            "data_loading": loading / self._window_s if self._window_s else None,
            "operators": [_operator(average) for average in steps[:_SHOWN]],
        }

    def _busy(self, recording: profile) -> float:
        events = recording.events() or ()  # type: ignore[no-untyped-call]
        on_gpu = (event.time_range for event in events if event.device_type.name == "CUDA")
        return busy_share(((span.start, span.end) for span in on_gpu), self._window_s)


def _is_kernel(average: Any) -> bool:
    """Whether it ran on the GPU itself; what the script or DDP names there (`record_function`) spans kernels."""
    named = getattr(average, "is_user_annotation", False)
    return average.device_type.name == "CUDA" and not named and average.self_device_time_total > 0


def _operator(average: Any) -> dict[str, Any]:
    return {
        "name": average.key,
        "calls": average.count,
        "cpu_seconds": average.self_cpu_time_total / 1e6,
        "gpu_seconds": average.self_device_time_total / 1e6,
    }


def busy_share(spans: Iterable[tuple[float, float]], seconds: float) -> float:
    """Return the share of `seconds` in which at least one of the spans (in microseconds) was under way."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return min(1.0, total / 1e6 / seconds) if seconds else 0.0


def _nsys_watches() -> bool:
    return "NSYS_PROFILING_SESSION_ID" in os.environ and torch.cuda.is_available()


def _nsys(call: str) -> None:
    torch.cuda.synchronize()
    getattr(torch.cuda.cudart(), call)()  # type: ignore[no-untyped-call]


# What a trial of resuming wants to know of the script's steps.


class Trying:
    """The loss of every step so far, which is saved and put back with the rest; nothing outside trials."""

    def __init__(self, trial: Trial | None) -> None:
        self._on = trial is not None
        self._losses: list[float | None] = []

    def stepped(self, loss: Any) -> None:
        """A step was done; for a loss on a GPU this waits, as nobody measures a trial."""
        if self._on:
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            self._losses.append(None if loss is None else float(loss))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {LOSSES: list(self._losses)} if self._on else {}

    def put_back(self, own: dict[str, Any]) -> None:
        """Go on from what a checkpoint holds."""
        self._losses = list(own.get(LOSSES, []))
