"""Every error that the SSH library has becomes one of ours."""

from __future__ import annotations

import inspect
from dataclasses import replace

import paramiko
import pytest
from paramiko import ssh_exception

from gpucloud.adapters.ssh.failures import may_pass, node_error, translated
from gpucloud.domain.errors import HostKeyMismatch, HostUnreachable, NodeError
from tests.fakes.nodes import node_at

NODE = node_at(22, None)
KEY = paramiko.RSAKey.generate(1024)
MADE = {
    "BadAuthenticationType": lambda: ssh_exception.BadAuthenticationType("no", ["password"]),
    "PartialAuthentication": lambda: ssh_exception.PartialAuthentication(["password"]),
    "ChannelException": lambda: ssh_exception.ChannelException(2, "Connect failed"),
    "BadHostKeyException": lambda: ssh_exception.BadHostKeyException("h", KEY, KEY),
    "ProxyCommandFailure": lambda: ssh_exception.ProxyCommandFailure("nc", 1),
    "NoValidConnectionsError": lambda: ssh_exception.NoValidConnectionsError({("h", 22): OSError(111, "refused")}),
}
CLASSES = [kind for _, kind in inspect.getmembers(ssh_exception, inspect.isclass) if issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_library_error_is_mapped(kind: type[Exception]):
    make = MADE.get(kind.__name__)
    with pytest.raises(NodeError) as caught, translated(NODE):
        raise make() if make else kind("why")
    assert isinstance(caught.value, HostUnreachable | HostKeyMismatch)
    assert "n1 (127.0.0.1:22)" in caught.value.message


@pytest.mark.parametrize(
    "error", [OSError(113, "No route to host"), TimeoutError("slow"), EOFError(), ConnectionResetError()]
)
def test_socket_errors_are_mapped_and_may_pass(error: Exception):
    assert isinstance(node_error(error, NODE), HostUnreachable)
    assert may_pass(error)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ssh_exception.AuthenticationException("no"), "refused the key"),
        (ssh_exception.PasswordRequiredException("locked"), "passphrase"),
        (ssh_exception.IncompatiblePeer("Incompatible ssh peer (no acceptable host key)"), "not the pinned one"),
        (OSError("ssh ended with exit code 255: Host key verification failed."), "the host key of bob@door, on "),
        (OSError("ssh ended with exit code 255: bob@door: Permission denied (publickey)."), "bob@door, on the way"),
    ],
)
def test_what_waiting_cannot_cure_is_said_at_once(error: Exception, what: str):
    assert not may_pass(error)
    assert what in node_error(error, replace(NODE, proxy=("ssh", "-W", "127.0.0.1:22", "bob@door"))).message


def test_too_many_handshakes_may_pass():
    assert may_pass(paramiko.SSHException("Error reading SSH protocol banner"))
