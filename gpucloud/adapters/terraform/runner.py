"""python_terraform, wrapped once: every command runs to its end, in a session of its own, into a log file.

The package builds the command line; how it runs and reports is replaced, since version 0.10.1 shares the caller's
process group, buffers all output, hides failures, and takes any misspelt method for a command.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from python_terraform import IsFlagged, Terraform

from gpucloud.adapters.terraform import events, keeper
from gpucloud.adapters.terraform.events import Explain, failure
from gpucloud.domain.errors import GpucloudError, ProvisionError

_POLL_S = 0.01
# A caller that has given up leaves Terraform this much time; then it is asked to end, and at last killed.
_LEFT_ALONE_S, _MERCY_S = 60.0, 30.0
_LOGS_KEPT = 20
FLAG = IsFlagged


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command that ended well: what it wrote, and where that is kept."""

    text: str
    log: Path

    @property
    def events(self) -> tuple[events.Event, ...]:
        """The JSON events among its lines."""
        return tuple(event for event in map(events.parse, self.text.splitlines()) if event is not None)


def ends_within(limit_s: float) -> float:
    """Return after how many seconds every Terraform that was started with this limit is gone, whatever happened."""
    return limit_s + _LEFT_ALONE_S + _MERCY_S + 30.0  # for clocks and for ticks


class Runner(Terraform):  # type: ignore[misc]  # the package has no types
    """Runs Terraform commands in one folder, under one lock; `story` is told while they run."""

    def __init__(  # noqa: PLR0913  one connection, made in one place
        self,
        program: Path,
        folder: Path,
        *,
        env: Mapping[str, str],
        lock_fd: int,
        story: Callable[[str], None],
        limit_s: float,
        explain: Explain | None = None,
    ) -> None:
        self._env = env
        self._explain = explain
        self._lock_fd = lock_fd
        self._story = story
        self._limit_s = limit_s
        super().__init__(working_dir=str(folder), terraform_bin_path=str(program))

    def __getattr__(self, name: str) -> Any:
        """Refuse what is not there; the package would run it as a command."""
        raise AttributeError(name)

    def read_state_file(self, file_path: str | None = None) -> None:  # noqa: ARG002  the package's signature
        """Read nothing: `show -json` answers for every backend."""
        self.tfstate = None

    def cmd(self, cmd: str, *args: str, begin: Callable[[int], None] | None = None, **options: Any) -> Finished:
        """Run one command and return what it wrote; ProvisionError, with Terraform's own words, when it fails.

        `begin` is told the process group that will do the work, before it does anything.

        Ctrl-C once: Terraform finishes its call, then KeyboardInterrupt. Twice, or `limit_s` over: Terraform is left
        to finish by itself, and the next command waits for it.
        """
        log = self._new_log(cmd)
        argv: list[str] = self.generate_cmd_string(cmd, *args, **options)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                self._kept(argv),
                cwd=self.working_dir,
                env=dict(self._env),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=(self._lock_fd,),
                start_new_session=True,
            )
        _say_go(process, begin)
        code = self._patiently(_Ending(process), log)
        finished = Finished(text=log.read_text(errors="replace"), log=log)
        if code != 0:
            raise self._failure(cmd, code, finished)
        return finished

    def _kept(self, argv: list[str]) -> list[str]:
        limits = [str(self._limit_s + _LEFT_ALONE_S), str(_MERCY_S)]
        return [sys.executable, "-I", "-S", keeper.__file__, str(self._lock_fd), *limits, *argv]

    def _failure(self, cmd: str, code: int, finished: Finished) -> GpucloudError:
        said = events.errors(finished.events) or (events.plain(finished.text) or f"exit code {code}",)
        return failure(cmd, said, finished.log, self._explain)

    def _patiently(self, ending: _Ending, log: Path) -> int:
        with log.open(errors="replace") as lines:
            try:
                return self._follow(ending, lines)
            except KeyboardInterrupt:
                self._story("finishing Terraform's call; Ctrl-C again leaves it to finish by itself")
                self._follow(ending, lines)
                raise

    def _follow(self, ending: _Ending, lines: TextIO) -> int:
        """Tell the story until the process has ended, and return its exit code."""
        deadline = time.monotonic() + self._limit_s
        line = ""
        while True:
            ended = ending.code
            line += (read := lines.readline())
            if line.endswith("\n"):
                self._tell(line)
                line = ""
            elif not read:
                if ended is not None:
                    return ended
                if time.monotonic() > deadline:
                    raise ProvisionError(
                        f"Terraform has not ended after {self._limit_s:.0f} s; it goes on by itself",
                        hint=f"see {lines.name}; the same command again waits for it",
                    )
                time.sleep(_POLL_S)

    def _tell(self, line: str) -> None:
        event = events.parse(line)
        told = events.tell(event) if event is not None else None
        if told is not None:
            self._story(told)

    def _new_log(self, cmd: str) -> Path:
        logs = Path(self.working_dir) / "logs"
        logs.mkdir(exist_ok=True)
        old = sorted(logs.glob("*.jsonl"))
        for path in old[:-_LOGS_KEPT]:
            path.unlink()
        number = 1 + (int(old[-1].name.partition("-")[0]) if old else 0)
        return logs / f"{number:06d}-{cmd}.jsonl"


class _Ending:
    """Waits for a process in a thread of its own, where no Ctrl-C comes: `code` is its exit code, None until then.

    `Popen.poll` takes a lock; interrupted before it lets it go, it never again says that the process has ended.
    """

    code: int | None = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.code = self._process.wait()


def _say_go(process: subprocess.Popen[bytes], begin: Callable[[int], None] | None) -> None:
    """Let the keeper run its command; when `begin` fails it never does."""
    assert process.stdin is not None  # noqa: S101  it was asked for
    with process.stdin as go:
        try:
            if begin is not None:
                begin(process.pid)
        except BaseException:
            go.close()
            process.wait()
            raise
        go.write(b"\n")
