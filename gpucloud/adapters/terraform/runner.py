"""python_terraform, wrapped once: every command runs to its end, in a session of its own, into a log file.

The package builds the command line; how it runs and reports is replaced, since version 0.10.1 shares the caller's
process group, buffers all output, hides failures, and takes any misspelt method for a command.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from python_terraform import IsFlagged, Terraform

from gpucloud.adapters.terraform import guard
from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError, ToolMissing

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
    def events(self) -> tuple[Event, ...]:
        """The JSON events among its lines."""
        return tuple(event for event in map(parse, self.text.splitlines()) if event is not None)


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
        return [sys.executable, "-I", "-S", guard.__file__, str(self._lock_fd), *limits, *argv]

    def _failure(self, cmd: str, code: int, finished: Finished) -> GpucloudError:
        said = errors(finished.events) or (plain(finished.text) or f"exit code {code}",)
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
        event = parse(line)
        told = tell(event) if event is not None else None
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
    """Let the guard run its command; when `begin` fails it never does."""
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


# What Terraform says: its `-json` lines as a story, and what its failures mean.
#
# Format: https://developer.hashicorp.com/terraform/internals/machine-readable-ui. A line that is not a JSON object (a
# warning about the CLI configuration, a log line) is passed over, and kept for when nothing else explains a failure.


Event = Mapping[str, Any]

_DOING = {"create": "making", "update": "changing", "delete": "removing", "read": "reading"}
_DONE = {"add": "made", "change": "changed", "remove": "removed"}
_LOCAL_EXEC = re.compile(r"Error running command '.*?': (exit status \d+)\. Output: (.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def parse(line: str) -> Event | None:
    """Return the event on this line, if there is one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def tell(event: Event) -> str | None:
    """Return the line that people get to see for this event, if any."""
    kind, hook = event.get("type"), event.get("hook", {})
    address = hook.get("resource", {}).get("addr")
    action = str(hook.get("action"))
    if kind == "change_summary":
        return _summary(event["changes"])
    if kind == "apply_progress":
        return f"Terraform is {_DOING.get(action, 'at')} {address} ({hook.get('elapsed_seconds')} s)"
    if kind == "diagnostic" and event["diagnostic"].get("severity") == "warning":
        return f"Terraform warns: {event['diagnostic'].get('summary')}"
    return None


def errors(events: Iterable[Event]) -> tuple[str, ...]:
    """Return each error as `address: text`, in our shape; a failed local command gives its own output."""
    return tuple(
        _error(event["diagnostic"])
        for event in events
        if event.get("type") == "diagnostic" and event["diagnostic"].get("severity") == "error"
    )


def outputs(events: Iterable[Event]) -> dict[str, Any]:
    """Return the outputs' values after an apply, by name."""
    found: dict[str, Any] = {}
    for event in events:
        if event.get("type") == "outputs":
            found = {name: output.get("value") for name, output in event["outputs"].items()}
    return found


def addresses(shown: Iterable[Event]) -> tuple[str, ...]:
    """Return the addresses in a `show -json` answer, those of child modules too."""
    modules = [event.get("values", {}).get("root_module", {}) for event in shown]
    found: list[str] = []
    while modules:
        module = modules.pop()
        found += [resource["address"] for resource in module.get("resources", ())]
        modules += module.get("child_modules", ())
    return tuple(sorted(found))


def plain(text: str) -> str:
    """Return the lines that are not events, without colours, at most the last 400 characters."""
    lines = (_COLOUR.sub("", line).strip(" │╷╵\t") for line in text.splitlines() if parse(line) is None)
    return " ".join(line for line in lines if line)[-400:]


def _summary(changes: Mapping[str, Any]) -> str | None:
    """Say what was done, once it is done; a plan is only on its way to that."""
    done = [(word, int(changes[kind])) for kind, word in _DONE.items() if changes.get(kind)]
    if not done or changes.get("operation") == "plan":
        return None
    told = ", ".join(f"{word} {number}" for word, number in done)
    return f"Terraform {told} {'resource' if done[-1][1] == 1 else 'resources'}"


def _error(diagnostic: Mapping[str, Any]) -> str:
    detail = str(diagnostic.get("detail") or "").strip()
    local = _LOCAL_EXEC.fullmatch(detail)
    text = (local[2].strip() or local[1]) if local else f"{diagnostic.get('summary')}: {detail}".removesuffix(": ")
    address = diagnostic.get("address")
    return f"{address}: {text}" if address else text


# What a failed Terraform command means: who must act, and how.


Explain = Callable[[str, str], GpucloudError | None]
"""Given the cloud's code and its own words, the error to raise; None when the code is not known."""

_API_ERROR = re.compile(r"api error ([A-Za-z][\w.]*): (.*)")
_NO_CREDENTIALS = re.compile(
    r"No valid credential sources found|failed to refresh cached credentials|failed to get shared config profile"
    r"|Retrieving AWS account details|get credentials|SSO token|validating provider credentials"
)
_NO_PROVIDER = re.compile(
    r"Failed to query available provider packages|Failed to install provider|could not connect to registry"
    r"|checksums? (previously|for provider)|doesn't match any of the checksums|Required plugins are not installed"
    r"|Inconsistent dependency lock file|failed to instantiate provider|Failed to load plugin schemas"
)
_LOCKED = "Error acquiring the state lock"
_EXISTS = re.compile(
    r"\b(\w*AlreadyExists\w*|\w+\.Duplicate|EntityAlreadyExists|DuplicateSubnet|InvalidSubnet\.Conflict"
    r"|DuplicateRecordException|RouteTableAssociation\w*|Resource\.AlreadyAssociated)\b|already exists"
)


class AlreadyThere(ProvisionError):
    """Terraform was refused because what it would make exists: its state does not know everything."""


def failure(command: str, said: Sequence[str], log: Path, explain: Explain | None) -> GpucloudError:
    """Return the error for what Terraform said: with the cloud's own code explained where it is known."""
    text = f"terraform {command}: " + "\n".join(said)
    hint = f"see {log}"
    if any(_NO_PROVIDER.search(line) for line in said):
        return ToolMissing(text, hint=f"{_PLUGIN_HINT}; {hint}")
    if any(_LOCKED in line for line in said):
        return ProvisionError(f"terraform {command}: {_who_holds(said)}", hint=f"try again when it has ended; {hint}")
    for found in (_API_ERROR.search(line) for line in said):
        known = explain(found[1], found[2]) if found and explain else None
        if known is not None and not isinstance(known, ProvisionError):
            return known
    if explain and any(_NO_CREDENTIALS.search(line) for line in said):
        return CredentialsError(text, hint="log in to AWS: `aws configure` or `aws sso login`")
    if any(_EXISTS.search(line) for line in said):
        return AlreadyThere(text, hint=hint)
    return ProvisionError(_humanly(command, said, explain), hint=hint)


_PLUGIN_HINT = (
    "let this machine reach Terraform's registry, or set GPUCLOUD_TF_PLUGIN_DIR to a folder with the provider in the"
    " version that gpucloud's lock names, packed as `terraform providers mirror` does"
)


def _who_holds(said: Sequence[str]) -> str:
    text = "\n".join(said)
    who, since = (re.search(rf"^\s*{word}:\s+(.+)$", text, re.MULTILINE) for word in ("Who", "Created"))
    return f"{who[1] if who else 'another run'} holds the lock on the state since {since[1] if since else 'a while'}"


def _humanly(command: str, said: Sequence[str], explain: Explain | None) -> str:
    """Return each line, with the cloud's code put first as one human line where it is known."""
    lines = []
    for line in said:
        found = _API_ERROR.search(line)
        known = explain(found[1], found[2]) if found and explain else None
        lines.append(known.message + (f" ({known.hint})" if known.hint else "") if known else line)
    return f"terraform {command}: " + "\n".join(dict.fromkeys(lines))
