"""Rebooting a node, and waiting until it is there again."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.errors import HostUnreachable, NodeError, ShellClosed
from gpucloud.ports import Clock, Host

_LIMIT = timedelta(minutes=10)  # bare metal with eight GPUs takes five
_PAUSE_S = 3.0
_ASKED_S = 15.0
_BOOT_ID = ("cat", "/proc/sys/kernel/random/boot_id")
# As root, else by sudo without a password; where there is no systemd, `reboot` asks whatever is there.
REBOOT = """\
if [ "$(id -u)" -eq 0 ]; then systemctl reboot || reboot
else sudo -n systemctl reboot || sudo -n reboot
fi
"""


def reboot(host: Host, boot_id: str, clock: Clock) -> None:
    """Reboot the node and return when a boot other than `boot_id` answers. Raises NodeError."""
    try:
        done = host.run(("/bin/sh", "-c", REBOOT), timeout_s=_ASKED_S)
    except HostUnreachable:
        done = None  # it went before it could answer, or did not get the order: its boot says which
    if done is not None and done.exit_code != 0:
        said = done.stderr.decode("utf-8", errors="replace").strip()
        # A node that goes down may end the order's shell too, by a signal (128 + n).
        if done.exit_code < 128:
            raise NodeError(f"{host.node.id} does not reboot: {said}", hint="let its user reboot by sudo, or reboot it")
    come_back(host, (None, boot_id), clock)


def come_back(host: Host, not_yet: tuple[str | None, ...], clock: Clock) -> None:
    """Return when a node that reboots answers with another boot id than these (None: no answer). Raises NodeError."""
    deadline = clock.now() + _LIMIT
    while clock.now() < deadline:
        clock.sleep(_PAUSE_S)
        if _boot_id(host) not in not_yet:
            return
    raise NodeError(f"{host.node.id} did not come back within 10 min of a reboot", hint="replace the node")


def _boot_id(host: Host) -> str | None:
    try:
        done = host.run(_BOOT_ID, timeout_s=_ASKED_S)
    except ShellClosed:
        raise
    except HostUnreachable:
        return None
    return done.stdout.decode("ascii", errors="replace").strip() if done.exit_code == 0 else None
