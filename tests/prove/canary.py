"""Planted secrets of a whole job are nowhere but in the job's own environment."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.commandline import command_line
from tests.lab.aws.world import SECRET_KEY
from tests.prove.goal import Figure, Form, Goal
from tests.standins.aws import account
from tests.standins.secrets_in_aws import Files, Secrets, look_through_aws

_SCRIPT = """
import os, sys, time
print("the token is", os.environ["HF_TOKEN"], flush=True)
print("the key is", os.environ["DEPLOY_KEY"], file=sys.stderr, flush=True)
assert "AWS_SECRET_ACCESS_KEY" not in os.environ, "the caller's own credentials came along"
time.sleep(3)
open("seen", "w").write("".join(sorted(n for n in os.environ if n in ("HF_TOKEN", "WANDB_API_KEY", "DEPLOY_KEY"))))
"""
_JOB = """\
name: small
code: code
run: train.py
launcher: plain
checkpoint: none
resources: {nodes: 1, gpus: 1}
budget: 1 USD
outputs: [seen]
secrets: [HF_TOKEN, WANDB_API_KEY, DEPLOY_KEY]
"""
# Secrets of the job, which its script gets; and the caller's own, which nobody gets.
GIVEN = {
    "HF_TOKEN": "hf_" + "CanaryHuggingFaceTokenAAAA",
    "WANDB_API_KEY": "canarywandb0123456789abcdef0123456789abc",
    "DEPLOY_KEY": "-----BEGIN OPENSSH PRIVATE KEY-----\nCanaryKeyLineOneAAAAAAAA\nCanaryKeyLineTwoBBBB\n---END---",
}
OWN = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
    "AWS_SECRET_ACCESS_KEY": "CanarySecretAccessKey/0123456789abcdefgh",
    "AWS_SESSION_TOKEN": "CanarySessionToken0123456789",
}
_WORDS = {
    name: [line.encode() for line in value.splitlines() if "Canary" in line or "canary" in line.lower()]
    for name, value in (GIVEN | OWN).items()
}

_LEAST = {"requests": 300, "objects": 10, "user data": 1, "listings": 12, "state": 1, "variables": 1}


class _Watch:
    """Looks at every process's command line, and environment, again and again."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.looks = 0
        self._own = {os.getpid(), os.getppid()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_again(self) -> None:
        while not self._over.wait(0.05):
            self.looks += 1
            for pid in os.listdir("/proc"):
                if pid.isdigit() and int(pid) not in self._own:
                    self._look(pid)

    def _look(self, pid: str) -> None:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return
        for name, words in _WORDS.items():
            if any(word in line for word in words):
                self.found.add(f"{name} is in the command line {line.split(bytes(1))[:4]!r}")


def run(form: Form) -> Iterator[Figure]:
    """Yield where secrets were found, and how much was looked through."""
    with tempfile.TemporaryDirectory() as name, command_line(Path(name), **GIVEN, **OWN) as line:
        code = line.folder / "code"
        code.mkdir()
        (code / "train.py").write_text(_SCRIPT)
        (line.folder / "small.yaml").write_text(_JOB)
        with _Watch() as watch:
            kept = line.run("train", "small.yaml", "--keep")
            wrong = [f"the job failed: {kept.stderr[-1500:]}"] if kept.code else []
            files, open_files = _in_files(line.home, nodes_too=True)
            down = line.run("down", "small")
            logs = line.run("logs", "small", "--json")
            status = line.run("status", "small", "--json")
            debug = line.run("--debug", "plan", "small.yaml")
        seen = list(line.folder.rglob("seen"))
        wrong += [] if seen else ["the script's own word did not come home"]
        for what, answer in {"train": kept, "down": down, "logs": logs, "status": status, "plan": debug}.items():
            wrong += _hits(f"what `{what}` says", (answer.stdout + answer.stderr).encode())
        wrong += [] if "*****" in logs.stdout else ["the printed secret is not among the kept output at all"]
        later, _ = _in_files(line.home, nodes_too=False)
        wrong += sorted({*files, *later, *watch.found})
    for fault in wrong:
        sys.stderr.write(f"canary: {fault}\n")
    yield Figure(name="canary", value=len(wrong), limit=0)
    yield Figure(name="canary.files", value=open_files, limit=30, least=True)
    yield Figure(name="canary.looks_at_processes", value=watch.looks, limit=5, least=True)
    if form is Form.LONG:
        yield from _on_aws()


def _on_aws() -> Iterator[Figure]:
    """The same job on the emulated AWS; the caller's key there is the lab's own."""
    secrets = Secrets({name: _WORDS[name] for name in GIVEN} | {"the caller's AWS key": [SECRET_KEY.encode()]})
    with tempfile.TemporaryDirectory() as name, account(Path(name)) as aws:
        line = aws.line
        line.env |= GIVEN
        code = line.folder / "code"
        code.mkdir()
        (code / "train.py").write_text(_SCRIPT)
        (line.folder / "small.yaml").write_text(_JOB.replace("1 USD", "20 USD") + "cloud: aws\n")
        aws.lab.hear(secrets.hear)
        with _Watch() as watch, Files(line.home, secrets):
            kept = line.run("train", "small.yaml", "--keep")
            look_through_aws(aws, secrets)
            machines, _ = _in_files(aws.lab.folder / "machines", nodes_too=True)
            down = line.run("down", "small")
            look_through_aws(aws, secrets)
        for what, answer in {"train": kept, "down": down}.items():
            secrets.look("words", f"what `{what}` says", (answer.stdout + answer.stderr).encode())
            secrets.wrong |= {f"`{what}` failed: {answer.stderr[-1500:]}"} if answer.code else set()
    wrong = sorted({*secrets.wrong, *machines, *watch.found})
    for fault in wrong:
        sys.stderr.write(f"canary: on AWS: {fault}\n")
    yield Figure(name="canary.aws", value=len(wrong), limit=0)
    # A proof that looked at nothing would find nothing.
    for kind, least in _LEAST.items():
        value = secrets.looked.get(kind, 0)
        yield Figure(name=f"canary.aws-{kind.replace(' ', '-')}", value=value, limit=least, least=True)


def _in_files(home: Path, *, nodes_too: bool) -> tuple[list[str], int]:
    """Return secrets in files, but for the agent's own order and the script's own output on the node, for it alone."""
    wrong, looked = [], 0
    for path in home.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        looked += 1
        found = _hits(str(path.relative_to(home)), path.read_bytes())
        on_node = "attempts" in path.parts or path.name.startswith("desired")
        if found and on_node and nodes_too and not _others_may_read(path, home):
            continue
        wrong += found
    return wrong, looked


def _others_may_read(path: Path, home: Path) -> bool:
    """Whether another user can read the file: each folder above must let it in."""
    chain = [path, *(above for above in path.parents if above.is_relative_to(home))]
    bits = [stat.S_IROTH, *[stat.S_IXOTH] * (len(chain) - 1)]
    return all(one.stat().st_mode & bit for one, bit in zip(chain, bits, strict=True))


def _hits(where: str, data: bytes) -> list[str]:
    return [f"{name} is in {where}" for name, words in _WORDS.items() if any(word in data for word in words)]


GOAL = Goal(
    promise="planted secrets are in no state, object, log, story or command line; other users can read none; on AWS "
    "they are in no request, tag, parameter or user data, nor in Terraform's state, variables and files",
    real="a job on the embedded fleet from `train` to `down` whose script prints its secrets; all files, all "
    "processes; long: the same job on AWS with Terraform, its provider and boto3, each request as it was sent",
    simulated="AWS: its machines are SSH servers of this one; there, what is base64, zip or gzip is opened",
    run=run,
)
