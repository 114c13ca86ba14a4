"""What paramiko and the socket raise, in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import paramiko
from paramiko.ssh_exception import IncompatiblePeer, MessageOrderError

from gpucloud.domain.errors import HostKeyMismatch, HostUnreachable, KeyRefused, NodeError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Node

GONE = "the node may still boot, be gone, or be behind a firewall: see `gpucloud status`"
LIBRARY_ERRORS = (paramiko.SSHException, OSError, EOFError)


@contextmanager
def translated(node: Node) -> Iterator[None]:
    """Raise NodeErrors in place of the library's."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise node_error(error, node) from error


def node_error(error: Exception, node: Node) -> NodeError:
    """Return what a library error means for the user."""
    where = f"{node.id} ({node.address}:{node.port})"
    match error:
        case paramiko.PasswordRequiredException():
            return KeyRefused(
                f"{where}: the private key is locked by a passphrase",
                hint="use a key without one, or one made by gpucloud",
            )
        case paramiko.AuthenticationException():
            return KeyRefused(
                f"{where}: refused the key of user {node.user}",
                hint=f"add the public key to {node.user}'s authorized_keys",
            )
        case paramiko.BadHostKeyException():
            return key_mismatch(node)
        case IncompatiblePeer() if "host key" in str(error):
            return key_mismatch(node)
        case OSError() if _is_refused_on_the_way(error):
            return _refused_on_the_way(node, error)
        case _:
            return HostUnreachable(f"{where}: {_reason(error)}", hint=GONE)


def key_mismatch(node: Node) -> HostKeyMismatch:
    """Return the error for a host that does not prove the pinned key."""
    mend = "end the node and start a new one"
    if node.pool.market is Market.OWNED:
        mend = (
            f"compare `ssh-keyscan -p {node.port} {node.address}` with /etc/ssh/ssh_host_ed25519_key.pub there, and"
            " mend `host_key:` in the job file, or its line in known_hosts"
        )
    return HostKeyMismatch(
        f"{node.id} ({node.address}:{node.port}): the host key is not the pinned one; nothing was sent",
        hint=f"another machine has this address now, or somebody listens in: {mend}",
    )


def may_pass(error: Exception) -> bool:
    """Whether a booting node may cause this: nobody listens yet, too many handshakes, cut off, no answer."""
    final = (paramiko.AuthenticationException, paramiko.BadHostKeyException, IncompatiblePeer, MessageOrderError)
    passing = isinstance(error, LIBRARY_ERRORS) and not isinstance(error, final)
    return passing and not _is_refused_on_the_way(error)


# OpenSSH's last words as the program that leads to the node (ssh.c, sshconnect2.c): asking again cannot help.
_UNKNOWN_KEY = "Host key verification failed"
_NO_LOGIN = "Permission denied ("


def _is_refused_on_the_way(error: Exception) -> bool:
    return isinstance(error, OSError) and any(words in str(error) for words in (_UNKNOWN_KEY, _NO_LOGIN))


def _refused_on_the_way(node: Node, error: Exception) -> NodeError:
    where, way = f"{node.id} ({node.address}:{node.port})", " ".join(node.proxy[-1:])
    if _UNKNOWN_KEY in str(error):
        return HostKeyMismatch(
            f"{where}: the host key of {way}, on the way there, is not an accepted one; nothing was sent",
            hint=f"log in to {way} once with `ssh`, and compare the key that it shows",
        )
    return KeyRefused(f"{where}: {way}, on the way there: {error}", hint=f"add the public key to {way}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
