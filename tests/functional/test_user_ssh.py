"""The user's own SSH: accepted host keys as OpenSSH writes them, keys as its agent holds them, its configuration."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.adapters.hosts.cloud import Configured, Sources, places
from gpucloud.adapters.ssh.identity import Said, UserKeys, known_key, said_of
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostKeyMismatch, KeyRefused, NodeError
from gpucloud.domain.job.spec import OwnHost, SshChoices
from tests.fakes.nodes import embedded_server

LOG_IN = """
import sys
from pathlib import Path
from gpucloud.adapters.ssh.identity import UserKeys
from gpucloud.adapters.ssh.shell import SshShell
from tests.fakes.nodes import node_at

shell = SshShell(UserKeys({keys}))
print(shell.host(node_at(int(sys.argv[1]), sys.argv[2])).run(("true",)).exit_code)
shell.close()
"""
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZ1bGwgb2Ygbm90aGluZyBhdCBhbGwsIGJ1dCAzMg"


def keygen(*words: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, capture_output=True)


def made(folder: Path, kind: str, *more: str, passphrase: str = "") -> Path:
    path = folder / f"id_{kind}"
    keygen("-t", kind, "-N", passphrase, "-f", path, *more)
    return path


def public(path: Path) -> str:
    kind, text, *_ = path.with_name(f"{path.name}.pub").read_text().split()
    return f"{kind} {text}"


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize(("port", "written"), [(22, "gpu1.lab"), (2222, "[gpu1.lab]:2222")])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_key_that_the_user_accepted_is_found(tmp_path, kind, port, written, hashed):
    key = public(made(tmp_path, kind))
    file = tmp_path / "known_hosts"
    file.write_text(f"# a comment\n\nother.lab {KEY}\n{written},10.0.0.5 {key}\n")
    if hashed:
        keygen("-H", "-f", file)
        assert "gpu1.lab" not in file.read_text()

    assert known_key("gpu1.lab", port, [tmp_path / "none", file]) == key
    assert known_key("gpu1.lab", 23, [file]) is None


def test_of_several_keys_the_best_type_counts_and_a_revoked_one_never(tmp_path):
    rsa, ed25519 = public(made(tmp_path, "rsa")), public(made(tmp_path, "ed25519"))
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu1.lab {rsa}\ngpu1.lab {ed25519}\n")
    assert known_key("gpu1.lab", 22, [file]) == ed25519
    file.write_text(f"{file.read_text()}@revoked * {ed25519}\n@cert-authority *.lab {KEY}\n")
    assert known_key("gpu1.lab", 22, [file]) == rsa


def test_a_damaged_line_hides_no_other(tmp_path):
    key = public(made(tmp_path, "ed25519"))
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu1.lab ssh-ed25519 AAAA####\nhalf\ngpu1.lab {key}\n")
    assert known_key("gpu1.lab", 22, [file]) == key


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_the_usual_keys_of_every_type_log_in(tmp_path, kind, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = tmp_path / "ssh"
    folder.mkdir()
    path = made(folder, kind)
    with embedded_server(tmp_path / "node") as server:
        (tmp_path / "node" / "authorized_keys").write_text(public(path) + "\n")
        shell = SshShell(UserKeys(folder=folder))
        assert shell.host(server.node).run(("true",)).exit_code == 0
        shell.close()


@contextlib.contextmanager
def agent(*keys: Path) -> Iterator[str]:
    said = subprocess.run(["ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    found = dict(part.split("=") for part in said.replace("\n", "").split(";") if "=" in part)
    try:
        for key in keys:
            env = {**os.environ, "SSH_AUTH_SOCK": found["SSH_AUTH_SOCK"], "SSH_ASKPASS_REQUIRE": "force"}
            env["SSH_ASKPASS"] = str(key.with_name("ask"))
            subprocess.run(["ssh-add", str(key)], env=env, check=True, capture_output=True)
        yield found["SSH_AUTH_SOCK"]
    finally:
        os.kill(int(found["SSH_AGENT_PID"]), 15)


def test_a_key_with_a_passphrase_serves_through_the_agent_and_is_never_asked_for(tmp_path, monkeypatch):
    locked = made(tmp_path, "ed25519", passphrase="secret words")
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho secret words\n")
    ask.chmod(0o700)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(KeyRefused, match="locked by a passphrase") as refused, UserKeys(locked).keys():
        pass
    assert refused.value.hint == f"ssh-add {locked}"

    with agent(locked) as socket, embedded_server(tmp_path / "node") as server:
        (tmp_path / "node" / "authorized_keys").write_text(public(locked) + "\n")
        node = server.node
        for keys in (f"Path({str(locked)!r})", f"folder=Path({str(tmp_path / 'nothing')!r})"):
            # In a process of its own: here, tests may not open the agent's socket.
            words = [sys.executable, "-c", LOG_IN.format(keys=keys), str(node.port), node.host_key or ""]
            done = subprocess.run(words, env={**os.environ, "SSH_AUTH_SOCK": socket}, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_without_any_key_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(NodeError, match="no key to log in with"), UserKeys(folder=tmp_path).keys():
        pass


def test_the_configuration_says_where_a_host_is_and_who_we_are_there(tmp_path):
    file = tmp_path / "config"
    file.write_text(
        "Host gpu*\n  User ada\n  ProxyJump bob@gate.lab:2200\nHost gpu1\n  HostName 10.0.0.5\n  Port 2222\n"
    )
    assert said_of("gpu1", file) == Said(address="10.0.0.5", user="ada", port=2222, jump="bob@gate.lab:2200")
    assert said_of("gpu1", tmp_path / "none") == Said()


def sources(key: str | None = KEY, **said: object) -> Sources:
    return Sources(
        configured=lambda _: Configured(**said), key_of=lambda *_: key, known_hosts=Path("/home/ada/.ssh/known_hosts")
    )


def test_the_job_file_counts_before_the_configuration():
    host = OwnHost(address="gpu1", user="eve", host_key="ssh-rsa AAAA", jump="eve@door")
    (place,) = places(SshChoices(hosts=(host,)), sources(user="ada", jump="bob@gate", address="10.0.0.5", port=2222))
    assert (place.user, place.address, place.port, place.host_key) == ("eve", "10.0.0.5", 2222, "ssh-rsa AAAA")
    assert place.proxy[-1] == "eve@door"


def test_the_way_through_other_hosts_is_openssh_that_never_trusts_at_first_sight():
    host = OwnHost(address="gpu1", port=2222, jump="a@one,bob@gate.lab:2200")
    (place,) = places(SshChoices(hosts=(host,), key=Path("/k")), sources())
    assert place.proxy == (
        *("ssh", "-W", "gpu1:2222"),
        *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"),
        *("-o", "UserKnownHostsFile=/home/ada/.ssh/known_hosts", "-o", "ConnectTimeout=10"),
        *("-i", "/k", "-J", "a@one", "-p", "2200", "--", "bob@gate.lab"),
    )


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ((OwnHost(address="gpu1.lab"), OwnHost(address="gpu2.lab")), ("gpu1.lab", "gpu2.lab")),
        ((OwnHost(address="a"), OwnHost(address="a", port=23)), ("a", "a-p23")),
        ((OwnHost(address="a", gpus=(0, 1)), OwnHost(address="a", gpus=(2,))), ("a-g0-1", "a-g2")),
        ((OwnHost(address="fe80::1"),), ("fe80-1",)),
    ],
)
def test_every_entry_has_a_name_of_its_own(hosts, names):
    assert tuple(place.name for place in places(SshChoices(hosts=hosts), sources())) == names


def test_every_host_without_an_accepted_key_is_named(tmp_path):
    hosts = (OwnHost(address="gpu1"), OwnHost(address="gpu2", host_key=KEY), OwnHost(address="gpu3", port=2222))
    with pytest.raises(HostKeyMismatch, match="host key of gpu1, gpu3:2222 is not known; nothing was sent") as refused:
        places(SshChoices(hosts=hosts), sources(None))
    scan = "ssh-keyscan -p 22 gpu1 | tee -a"
    assert str(refused.value.hint).startswith(f"mkdir -p -m 700 /home/ada/.ssh; {scan} /home/ada/.ssh/known_hosts | ")
    with pytest.raises(HostKeyMismatch) as refused:
        places(SshChoices(hosts=hosts), replace(sources(None), known_hosts=tmp_path / "known_hosts"))
    assert str(refused.value.hint).startswith(f"{scan} {tmp_path}/known_hosts | ")
