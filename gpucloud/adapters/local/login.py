"""The account that nodes run as."""

from __future__ import annotations

import os
import pwd


def user_name() -> str:
    """Return the name of the account that nodes run as."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run as numbers without a name
        return str(os.getuid())
