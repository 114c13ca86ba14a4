"""Every command as a CI job runs it: closed stdin, no terminal, TERM=dumb. No prompt, documented codes, whole JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import click
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gpucloud.cli.app import app
from tests.commandline import CommandLine
from tests.prove.goal import Figure, Form, Goal

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
_PROMPT = re.compile(
    r"\[[ynscd]/?|\[[sdc]\]|password:|passphrase|^(?!hint: did you mean).*\? *$", re.IGNORECASE | re.MULTILINE
)
_TERMINAL = re.compile(r"[\x1b\r\x08]")
_UNREACHABLE = "http://127.0.0.1:9"


class Says(Enum):
    """What is on stdout: with `--json`, or always."""

    OBJECT = "one JSON object with a version"
    LINES = "one JSON object a line"
    DOCUMENT = "one JSON object in others' form"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Case:
    """A command line, the exit code that docs/commands.md has for it, and its answer's form."""

    words: str
    code: int = 0
    says: Says = Says.OBJECT

    @property
    def argv(self) -> list[str]:
        """The words, and `--json` where it asks for JSON."""
        before, dashes, after = self.words.partition(" -- ")
        asked = [] if self.says is Says.TEXT else ["--json"]
        return [*before.split(), *asked, *(["--", *after.split()] if dashes else [])]


_TEXT, _LINES = Says.TEXT, Says.LINES
_OF_JOBS = ("status", "cost", "budget", "watch", "logs", "events", "checkpoints", "down", "rm", "reconcile")
WITHOUT = (
    Case("--version", says=_TEXT),
    Case("nonsense", 2, says=_TEXT),
    Case("init demo"),
    Case("init demo", 2),
    Case("schema", says=Says.DOCUMENT),
    Case("completion bash", says=_TEXT),
    Case("docs"),
    Case("docs exit codes"),
    Case("docs nowhere", 2),
    Case("status"),
    Case("plan small.yaml"),
    Case("plan dear.yaml", 2),
    Case("plan far.yaml --cloud aws"),
    Case("plan small.yaml --plot cost.gif", 2),
    Case("simulate small.yaml --work 2h --deadline 4h --budget 20USD --windows 2"),
    Case("simulate small.yaml", 2),
    Case("up none.yaml", 2),
    Case("train none.yaml", 2),
    *(Case(f"{command} none", 2) for command in _OF_JOBS),
    *(Case(f"{command} none", 2, says=_TEXT) for command in ("metrics", "ssh")),
    *(Case(f"local {drill} none", 2) for drill in ("interrupt", "kill", "freeze")),
    Case("local shortage 0s"),
    Case("local shortage soon", 2),
    Case("cp small.yaml none:x", 2),
    Case("doctor none", 2),
    Case("cost --all"),
    Case("gc --cloud local"),
    *(Case(f"{command} far.yaml", 3) for command in ("quota show", "quota request", "quota status")),
    Case("iam policy far.yaml", says=Says.DOCUMENT),
    Case("iam policy --account 12", 2, says=_TEXT),
    Case("catalog refresh --region us-east-2", 3),
    Case("offers --gpu H100"),
    Case("offers --gpu H10", 2),
    Case("tools install", 5),
    Case("ci init", 2),
    Case("ci init --gitlab"),
    Case("keys"),
    Case("keys add ann none", 2),
    Case("keys revoke ann", 2),
    Case("keys add ann ann.pub"),
    Case("keys revoke ann"),
)
"""Without machines: every command, most of them about a job that is not there."""
WITH = (
    Case("train far.yaml", 3),
    Case("down --base --region us-east-2", 3),
    Case("up small.yaml"),
    Case("status small"),
    Case("cost small"),
    Case("cost small --by tag:project"),
    Case("cost small --csv -", says=_TEXT),
    Case("cost small --bill", 2),
    Case("budget small"),
    Case("budget small 2 USD"),
    Case("metrics small", says=_TEXT),
    Case("doctor"),
    Case("doctor small"),
    Case("ssh small -- true", says=_TEXT),
    Case("ssh small -- grep x none", 2, says=_TEXT),
    Case("cp small.yaml small:copied.yaml"),
    Case("local interrupt small --rebalance"),
    Case("local freeze small"),
    Case("local kill small"),
    Case("reconcile small"),
    Case("reconcile --all"),
    Case("train small.yaml"),
    Case("watch small", says=_LINES),
    Case("logs small", says=_LINES),
    Case("logs small --launch", says=_LINES),
    Case("events small", says=_LINES),
    Case("rm small", 2),
    Case("down small"),
    Case("rm small --yes"),
    Case("train failing.yaml", 20),
)
"""A job from `up` to `down`, in this order, in the same folder."""
JOB = """\
name: {name}
code: code
run: {run}
launcher: plain
resources: {{nodes: {nodes}, regions: [us-east-2]}}
budget: {budget}
"""
FAR = "cloud: aws\ncheckpoint: none\n"


def run(form: Form) -> Iterator[Figure]:
    """Yield how many commands did otherwise than said, and how many there were."""
    cases = WITHOUT if form is Form.SHORT else (*WITHOUT, *WITH)
    wrong = [*_missing(cases)]
    with tempfile.TemporaryDirectory(prefix="gpucloud-ci-") as name:
        line = _scene(Path(name))
        try:
            for case in cases:
                wrong += [f"{case.words}: {fault}" for fault in _faults(line, case)]
        finally:
            line.close()
    for one in wrong:
        sys.stderr.write(f"ci: {one}\n")
    yield Figure(name="ci", value=len(wrong), limit=0)
    yield Figure(name="ci.commands", value=len(cases), limit=30 if form is Form.SHORT else 60, least=True)


def _scene(folder: Path) -> CommandLine:
    """Return the command line in a folder with job files; no way to AWS, and no keys for it."""
    line = CommandLine(folder)
    (folder / "code").mkdir()
    (folder / ".git").mkdir()
    (folder / "code" / "work.py").write_text("for n in range(5):\n    print('step', n + 1)\n")
    (folder / "code" / "no.py").write_text("raise SystemExit(3)\n")
    (folder / "small.yaml").write_text(JOB.format(name="small", run="work.py", nodes=2, budget="1 USD"))
    (folder / "dear.yaml").write_text(JOB.format(name="dear", run="work.py", nodes=2, budget="0.000001 USD"))
    (folder / "failing.yaml").write_text(JOB.format(name="failing", run="no.py", nodes=1, budget="1 USD"))
    (folder / "far.yaml").write_text(JOB.format(name="far", run="no.py", nodes=1, budget="9 USD") + FAR)
    key = Ed25519PrivateKey.generate().public_key()
    (folder / "ann.pub").write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    for name in [name for name in line.env if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        del line.env[name]
    line.env |= {"TERM": "dumb", "CI": "true", "HOME": str(folder), "AWS_EC2_METADATA_DISABLED": "true"}
    line.env |= {"HTTPS_PROXY": _UNREACHABLE, "HTTP_PROXY": _UNREACHABLE, "NO_PROXY": "127.0.0.0/8"}
    return line


def _faults(line: CommandLine, case: Case) -> Iterator[str]:
    started = time.monotonic()
    try:
        done = subprocess.run(
            ("sh", "-c", 'exec "$@" <&-', "sh", *line.argv(*case.argv)),
            cwd=line.folder,
            env=line.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            start_new_session=True,  # without a terminal that could be opened
        )
    except subprocess.TimeoutExpired:
        yield f"no end within {LIMIT_S:.0f} s"
        return
    if time.monotonic() - started > LIMIT_S / 2:
        yield "slow"
    if done.returncode != case.code:
        yield f"exit code {done.returncode}, not {case.code}: {done.stdout[-300:]} {done.stderr[-300:]}"
    if "Traceback" in done.stderr or done.returncode == 1:
        yield f"a fault of ours: {done.stderr[-500:]}"
    if _PROMPT.search(done.stderr):
        yield f"it asks: {done.stderr[-300:]}"
    if _TERMINAL.search(done.stdout + done.stderr):
        yield f"it speaks to a terminal: {(done.stdout + done.stderr)[-300:]!r}"
    yield from _wrong_json(case, done.stdout)


def _wrong_json(case: Case, said: str) -> Iterator[str]:
    if case.says is Says.TEXT:
        return
    texts = said.splitlines() if case.says is Says.LINES and case.code == 0 else [said]
    try:
        answers = [json.loads(text) for text in texts]
    except ValueError as error:
        yield f"no JSON ({error}): {said[-300:]!r}"
        return
    for answer in answers:
        if case.says is Says.DOCUMENT and isinstance(answer, dict):
            continue
        if not isinstance(answer, dict) or answer.get("version") != 1:
            yield f"no object with a version: {answer!r:.200}"
        elif "error" in answer and answer["error"]["exit_code"] != case.code:
            yield f"its JSON does not tell of exit code {case.code}: {answer!r:.300}"


def _missing(cases: tuple[Case, ...]) -> Iterator[str]:
    """Name commands that no case runs, and those that have `--json` and are not asked for it."""
    run_in = {" ".join(case.words.split()[: _depth(case)]): case for case in cases}
    for name, command in _leaves(typer.main.get_command(app)):
        has_json = any("--json" in parameter.opts for parameter in command.params)
        if name not in run_in:
            yield f"{name} is in no case"
        elif has_json and not any(c.words.startswith(name) and c.says is not Says.TEXT for c in cases):
            yield f"{name} has --json, and is not asked for it"


def _depth(case: Case) -> int:
    return 2 if case.words.split()[0] in ("ci", "local", "quota", "iam", "catalog", "tools", "keys") else 1


def _leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for key, one in inner.items():
        yield from _leaves(one, f"{name} {key}".strip())


GOAL = Goal(
    promise="every command with closed stdin, without a terminal and with TERM=dumb: no prompt, nothing meant for a"
    " terminal, the exit codes of docs/commands.md, and with --json one object with `version`, errors"
    " too (words that no command knows are told in text)",
    real="the command line as processes, the embedded fleet with a job from `init` to `down`",
    simulated="AWS: no keys, and no way there",
    run=run,
)
