"""Going on with the node's own bootstrap after a reboot: cloud-init runs a script on each boot."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.errors import NodeError
from gpucloud.ports import Clock, Host
from gpucloud.usecases.rebooting import REBOOT

_PER_BOOT = "/var/lib/cloud/scripts/per-boot"
_GOES_DOWN_WITHIN_S = 600.0
# The shell in the middle starts it in the background: cloud-init would wait, and with it `cloud-init status --wait`.
_SCRIPT = """\
#!/bin/sh
# The bootstrap of gpucloud's job goes on after a reboot; it removes this file when it has ended.
{command} </dev/null >>{log} 2>&1 &
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerBoot:
    """The script that goes on with the bootstrap of `root`, run from `package`, as `login`."""

    root: Path
    package: Path
    login: str

    def restart(self, host: Host, _boot_id: str, _clock: Clock) -> None:
        """Reboot, the script in place; returns never. Raises NodeError when the machine stays up."""
        self._put(host)
        done = host.run(("/bin/sh", "-c", REBOOT))
        if 0 < done.exit_code < 128:
            raise NodeError(f"no reboot: {done.stderr.decode(errors='replace').strip()}", hint="let its user reboot")
        time.sleep(_GOES_DOWN_WITHIN_S)  # we end with the machine
        raise NodeError("the machine did not go down within 10 min of its reboot", hint="replace the node")

    def remove(self, host: Host) -> None:
        """Have no script any more: a later boot is nobody's business but the supervisor's."""
        if self.path.exists():
            host.run(("sudo", "-n", "rm", "-f", str(self.path)))

    @property
    def path(self) -> Path:
        """Where cloud-init looks."""
        return Path(os.environ.get("GPUCLOUD_PER_BOOT", _PER_BOOT), "gpucloud-bootstrap")

    def text(self) -> str:
        """Return the script."""
        again = (sys.executable, "-I", str(self.package), "bootstrap", "--again", "--root", str(self.root))
        command = shlex.join(("sudo", "-n", "-H", "-u", self.login, "--", *again))
        return _SCRIPT.format(command=command, log=shlex.quote(str(self.root / "bootstrap.log")))

    def _put(self, host: Host) -> None:
        """Put it there whole: `mv` is the last thing done."""
        text = 'umask 022; mkdir -p "${1%/*}" && cat >"$1.new" && chmod 755 "$1.new" && mv -f "$1.new" "$1"'
        argv = ("sudo", "-n", "sh", "-c", text, "sh", str(self.path))
        done = host.run(argv, stdin=self.text().encode())
        if done.exit_code != 0:
            raise NodeError(f"{self.path}: {done.stderr.decode(errors='replace').strip()}", hint="let its user sudo")
