"""The user data of AWS machines: the script of their first boot, with what it must know."""

from __future__ import annotations

import shlex

from gpucloud.adapters.bundled import bundled
from gpucloud.domain.errors import UsageError

USER_DATA_BYTES = 16 * 1024
"""What EC2 takes, before its base64."""

POWER_OFF = (
    "sudo",
    "sh",
    "-c",
    'end="${GPUCLOUD_BOOT_DIR:-/var/lib/gpucloud}/end"; '
    '[ ! -x "$end" ] || timeout 60 "$end" || sleep 60; exec shutdown -h now',
)
"""How a machine ends itself: the script of its first boot lowers its group, or another one would be started."""

_END = "GPUCLOUD_FIRST_BOOT"
_TEXT = """#!/bin/sh
umask 077
d="${{GPUCLOUD_BOOT_DIR:-/var/lib/gpucloud}}"
mkdir -p "$d"
cat >"$d/first_boot.py" <<'{end}'
{script}{end}
cat >"$d/end" <<'{end}'
#!/bin/sh
exec python3 -I "${{0%/*}}/first_boot.py" end
{end}
chmod 700 "$d/end"
exec python3 -I "$d/first_boot.py" {words}
"""


def user_data(*, store_url: str, cluster: str, region: str) -> str:
    """Return a shell script that publishes the machine's host key; nothing in it is secret. Raises UsageError.

    The object is `<store>/clusters/<cluster>/hosts/<role id>:<instance id>`. The same arguments give the same text, so
    that Terraform sees no change. A machine on which no agent is started within 30 minutes powers itself off.
    """
    if not store_url.startswith("s3://"):
        raise UsageError(f"store: {store_url}: machines on AWS cannot write there", hint="store: s3://BUCKET/PREFIX")
    words = shlex.join((store_url, cluster, region))
    script = bundled("templates", "node", "first_boot.py").read_text(encoding="utf-8")
    text = _TEXT.format(script=script, words=words, end=_END)
    if len(text.encode()) > USER_DATA_BYTES:
        raise UsageError(f"store: {store_url}: too long for a machine's user data", hint="choose a shorter prefix")
    return text
