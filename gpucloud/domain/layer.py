"""When two jobs' `setup` on a node are the same layer, and when they are not."""

from __future__ import annotations

import hashlib
import json
import re
import shlex

BOTO3 = "boto3>=1.36"
"""What a store in S3 needs: the first with conditional writes (IfMatch on PutObject)."""


def suffices(version: str | None) -> bool:
    """Whether this boto3 can write to a store; None is that there is none."""
    parts = re.match(r"(\d+)\.(\d+)", version or "")
    return parts is not None and (int(parts[1]), int(parts[2])) >= (1, 36)


def setup_files(setup: str) -> tuple[str, ...]:
    """Return the files that a setup text names and whose content decides what it installs, such as requirements.txt."""
    return tuple(dict.fromkeys(re.findall(r"[\w./-]+\.(?:txt|toml|lock|in|cfg|ya?ml)\b", setup)))


def setup_uses_tree(setup: str) -> bool:
    """Whether a setup text installs from the synced tree itself (`pip install -e .`, `./install.sh`)."""
    try:
        words = shlex.split(setup, comments=True)
    except ValueError:
        return True
    return any(word in (".", "-e", "--editable") or word.startswith(("./", ".[")) for word in words)


def setup_digest(
    setup: str, files: tuple[tuple[str, bytes], ...], code: str, *, requirements: tuple[str, ...] = ()
) -> str:
    """Return the hash of all that a layer depends on, save the interpreter; `code` counts if the tree is used.

    `requirements` is what the layer must have beside what the setup installs.
    """
    parts = [setup, code if setup_uses_tree(setup) else ""]
    parts += [f"{name}={hashlib.sha256(data).hexdigest()}" for name, data in files]
    parts += requirements
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def layer_key(digest: str, python: str, version: tuple[int, ...]) -> str:
    """Return the layer's name: the same setup on the same interpreter is the same layer."""
    return hashlib.sha256(json.dumps([digest, python, list(version)]).encode()).hexdigest()[:24]
