"""Hostile strings in names, arguments, environment and paths arrive byte for byte or are refused; no file strays."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

from gpucloud.adapters.jobfile import read_job
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.adapters.transfer.copying import Copier
from gpucloud.adapters.transfer.localfiles import local_tree
from gpucloud.adapters.transfer.outputs import OutputsFolder
from gpucloud.domain.errors import JobFileError
from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.launch import launches
from gpucloud.domain.node.member import AttemptStart, Place
from tests.fakes.nodes import Server, embedded_server
from tests.prove.goal import Figure, Form, Goal
from tests.standins.agent_node import AgentNode

STRINGS = 1000
_ESCAPED = "\x7f\x85\u2028\u2029\ufeff"
_BATCH = {Form.SHORT: 500, Form.LONG: 50}
_PIECES = (
    "'", '"', "\\", "`id`", "$(touch owned)", "${HOME}", "$HOME", ";", "&&", "||", "|", ">", "<", "*", "?",
    "[a]", "{a,b}", "!",
    "#", "~", "~root", "%s", "%n", "%(x)s", "{0}", "..", "../..", "/", "//", "./", "-", "--", "-x", "--help", "-rf /",
    "=", "=x",
    " ", "  ", "\t", "\n", "\r", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\u200b", "\ufeff",
    "\u00e9", "e\u0301",
    "\u4e16\u754c", "\U0001f4a5", "\U0010ffff", "\ufffd", "a", "Z", "0", "null", "true", "~", "1e5", "0x1",
    "A=B", "\\n", "\\0",
    "$'\\n'", "$IFS", "(", ")", ":", ",", "@", "^", "--budget", "; rm -rf .", "\"; touch owned; \"",
    "'; touch owned; '",
)  # fmt: skip
_SCRIPT = """
import json, os, sys
told = {"argv": [os.fsencode(a).hex() for a in sys.argv[1:]]}
told["env"] = {os.fsdecode(k): v.hex() for k, v in os.environb.items() if k.startswith((b"V_", b"S_"))}
open(os.path.join(os.environ["GPUCLOUD_ATTEMPT_DIR"], "told.json"), "w").write(json.dumps(told))
"""


def strings() -> Iterator[str]:
    """Yield the hostile strings: each piece alone, then seeded sequences, some of 4 KiB."""
    chance = random.Random(11)
    yield from _PIECES
    for number in range(STRINGS - len(_PIECES)):
        text = "".join(chance.choice(_PIECES) for _ in range(chance.randint(2, 8)))
        yield (text * 4096)[:4096] if number % 50 == 0 else text


def run(form: Form) -> Iterator[Figure]:
    """Yield what arrived changed or strayed, and how many strings were tried and arrived."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = _Words(folder / "words")
        wrong = words.try_all(tuple(strings()), _BATCH[form])
        with embedded_server(folder / "node") as server:
            wrong += _files(folder, server)
        root = folder / "answers" / "home"
        wrong += [f"{path} was made" for path in folder.rglob("owned*") if not path.is_relative_to(root)]
    for fault in wrong:
        sys.stderr.write(f"inject: {fault[:400]}\n")
    yield Figure(name="inject", value=len(wrong), limit=0)
    yield Figure(name="inject.strings", value=STRINGS, limit=1000, least=True)
    yield Figure(name="inject.arrived", value=words.arrived, limit=1000, least=True)


class _Words:
    """A real agent that starts jobs whose arguments and variables are the strings."""

    def __init__(self, folder: Path) -> None:
        self.arrived = 0
        self._folder = folder
        (folder / "code").mkdir(parents=True)
        (folder / "code" / "train.py").write_text(_SCRIPT)
        data, sha256 = package_zip()
        self._package = folder / f"gpucloud-{sha256}.zip"
        self._package.write_bytes(data)
        self._agent = AgentNode(folder / "home", self._package)
        self._agent.root.mkdir(parents=True)

    def try_all(self, texts: tuple[str, ...], batch: int) -> list[str]:
        wrong: list[str] = []
        self._agent.start()
        try:
            for number, at in enumerate(range(0, len(texts), batch), 1):
                wrong += self._try(number, texts[at : at + batch])
        finally:
            self._agent.destroy()
        return wrong

    def _try(self, number: int, texts: tuple[str, ...]) -> list[str]:
        args, wrong = self._accepted(texts, "run", lambda s: f"train.py {quote(s)}")
        env, more = self._accepted(texts, "env", lambda s: {"V_0": s})
        wrong += more + self._names(texts)
        variables = {f"V_{at}": text for at, text in enumerate(env)}
        secrets = {f"S_{at}": text for at, text in enumerate(t for t in texts if "\0" not in t)}
        run = " ".join(["train.py", *map(quote, args)])
        # Each was read from a file of its own; all of them would be larger than a job file may be.
        job = replace(self._read({}), run=run, env=tuple(variables.items()))
        self._agent.want(self._launch(number, job, secrets))
        status = self._agent.wait_exited(number, 60).attempt
        if status is None or status.exit_code != 0:
            return [
                *wrong,
                f"the script ended with {status}: {(self._agent.folder(number) / 'rank-0.log').read_text()}",
            ]
        told = json.loads((self._agent.folder(number) / "told.json").read_text())
        wrong += _different("argument", dict(enumerate(args)), dict(enumerate(told["argv"])))
        wrong += _different("variable", variables | secrets, told["env"])
        self.arrived += len(args) + len(variables) + len(secrets)
        return wrong

    def _accepted(self, texts: tuple[str, ...], key: str, value: Any) -> tuple[list[str], list[str]]:
        """Return the strings that a job file takes there, and those refused without a word."""
        taken, wrong = [], []
        for text in texts:
            try:
                job = self._read({key: value(text)})
            except JobFileError as error:
                if "job.yaml:" not in str(error) or any(ord(c) < 32 and c != "\n" for c in str(error)):
                    wrong.append(f"{key}: {text!r} is refused with {str(error)!r}")
                continue
            if key == "env" and dict(job.env) != {"V_0": text}:
                wrong.append(f"{key}: {text!r} was read as {job.env!r}")
            taken.append(text)
        return taken, wrong

    def _names(self, texts: tuple[str, ...]) -> list[str]:
        """Names and tags go into commands and requests: what is not plain is refused."""
        wrong = []
        for text in texts:
            try:
                name = self._read({"name": text}).name
            except JobFileError:
                continue
            if not set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-"):
                wrong.append(f"the name {text!r} is taken")
        return wrong

    def _read(self, keys: Mapping[str, Any]) -> Job:
        file = self._folder / "job.yaml"
        content = {"name": "t", "run": "train.py", "budget": "1 USD", "code": "code", "launcher": "plain", **keys}
        text = json.dumps(content, ensure_ascii=False)
        for letter in _ESCAPED:  # line ends in YAML, or refused as they are
            text = text.replace(letter, f"\\u{ord(letter):04x}")
        file.write_text(text)
        return read_job(file)

    def _launch(self, number: int, job: Job, secrets: Mapping[str, str]) -> Any:
        here = SimpleNamespace(address="127.0.0.1", private_address="127.0.0.1", interface="lo", devices=(), id="n1")
        here.root, here.proxy, here.port = str(self._agent.root), (), 22
        code = str(self._folder / "code")
        place = Place(node=here, python=sys.executable, package=str(self._package), code=code, root=here.root)  # type: ignore[arg-type]
        start = AttemptStart(number=number, port=1, store_url="file:///nowhere", checkpoints="c")
        return launches(job, start, (place,), secrets)[0]


def _different(what: str, sent: Mapping[Any, str], told: Mapping[Any, str]) -> list[str]:
    wanted = {key: os.fsencode(text).hex() for key, text in sent.items()}
    keys = [key for key in wanted.keys() | told.keys() if wanted.get(key) != told.get(key)]
    return [f"{what} {key}: {sent.get(key)!r} arrived as {told.get(key)!r}" for key in keys]


def _files(folder: Path, server: Server) -> list[str]:
    """Files of hostile names: to the node by sync and `cp`, back by `cp -r` and as outputs."""
    code = folder / "tree"
    names = sorted({text.replace("/", "_") for text in strings() if "\0" not in text} - {".", "..", ""})
    names = [name for name in names if len(os.fsencode(name)) <= 200]
    for at, name in enumerate(names):
        place = code / name if at % 3 else code / name[:60] / name
        place = place if os.fsencode(name[:60]).strip() not in (b".", b"..") else code / f"d{at}" / name
        if not place.exists() and not any(above.is_file() for above in place.parents):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(os.fsencode(name))
    (code / "raw-\udcff\udcfe").write_bytes(b"not UTF-8")
    shell = SshShell(server.key_file)
    try:
        host = shell.host(server.node)
        synced = server.home / host.sync(code, "code")
        wrong = _unlike("sync", code, synced)
        copier = Copier(host, str(synced), python=sys.executable)
        files, links = local_tree(code, "copy")
        copier.send(files, links)
        wrong += _unlike("cp to", code, synced / "copy")
        home = OutputsFolder(("copy",), folder / "outputs", python=sys.executable)
        home.bring_home(host, str(synced), 1)
        return wrong + _unlike("outputs", code, folder / "outputs" / "copy")
    finally:
        shell.close()


def _unlike(how: str, one: Path, other: Path) -> list[str]:
    wanted, found = _content(one), _content(other)
    different = [path for path in wanted if found.get(path) != wanted[path]]
    return [f"{how}: {path!r} arrived as {found.get(path)!r}" for path in different]


def _content(folder: Path) -> dict[bytes, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {os.fsencode(path.relative_to(folder)): path.read_bytes() for path in files}


GOAL = Goal(
    promise="1,000 hostile strings in names, arguments, variables and paths arrive unchanged or are refused",
    real="the job file's reading, the agent and the started script's own view, SSH sync, `cp` and outputs",
    simulated="a node that lies about its files answers from a list; the container launchers are not among them",
    run=run,
)
