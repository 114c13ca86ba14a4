"""The user data of AWS machines: the script of their first boot, with what it must know."""

from __future__ import annotations

import shlex

from gpucloud.adapters.bundled import bundled
from gpucloud.domain.errors import UsageError

USER_DATA_BYTES = 16 * 1024
"""What EC2 takes, before its base64."""

_END = "GPUCLOUD_FIRST_BOOT"


def user_data(*, store_url: str, cluster: str, region: str) -> str:
    """Return a shell script that publishes the machine's host key; nothing in it is secret. Raises UsageError.

    The object is `<store>/clusters/<cluster>/hosts/<role id>:<instance id>`. The same arguments give the same text, so
    that Terraform sees no change. A machine on which no agent is started within 30 minutes powers itself off.
    """
    if not store_url.startswith("s3://"):
        raise UsageError(f"store: {store_url}: machines on AWS cannot write there", hint="store: s3://BUCKET/PREFIX")
    words = shlex.join(("python3", "-I", "-", store_url, cluster, region))
    script = bundled("templates", "node", "first_boot.py").read_text(encoding="utf-8")
    text = f"#!/bin/sh\nexec {words} <<'{_END}'\n{script}{_END}\n"
    if len(text.encode()) > USER_DATA_BYTES:
        raise UsageError(f"store: {store_url}: too long for a machine's user data", hint="choose a shorter prefix")
    return text
