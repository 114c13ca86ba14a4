"""What a failed Terraform command means: who must act, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError, ToolMissing

Explain = Callable[[str, str], GpucloudError | None]
"""Given the cloud's code and its own words, the error to raise; None when the code is not known."""

_API_ERROR = re.compile(r"api error ([A-Za-z][\w.]*): (.*)")
_NO_CREDENTIALS = re.compile(
    r"No valid credential sources found|failed to refresh cached credentials|failed to get shared config profile"
    r"|Retrieving AWS account details|get credentials|SSO token|validating provider credentials"
)
_NO_PROVIDER = re.compile(
    r"Failed to query available provider packages|Failed to install provider|could not connect to registry"
    r"|checksums? (previously|for provider)|doesn't match any of the checksums|Required plugins are not installed"
    r"|Inconsistent dependency lock file|failed to instantiate provider|Failed to load plugin schemas"
)
_LOCKED = "Error acquiring the state lock"
_EXISTS = re.compile(
    r"\b(\w*AlreadyExists\w*|\w+\.Duplicate|EntityAlreadyExists|DuplicateSubnet|InvalidSubnet\.Conflict"
    r"|DuplicateRecordException|RouteTableAssociation\w*|Resource\.AlreadyAssociated)\b|already exists"
)


class AlreadyThere(ProvisionError):
    """Terraform was refused because what it would make exists: its state does not know everything."""


def failure(command: str, said: Sequence[str], log: Path, explain: Explain | None) -> GpucloudError:
    """Return the error for what Terraform said: with the cloud's own code explained where it is known."""
    text = f"terraform {command}: " + "\n".join(said)
    hint = f"see {log}"
    if any(_NO_PROVIDER.search(line) for line in said):
        return ToolMissing(text, hint=f"{_PLUGIN_HINT}; {hint}")
    if any(_LOCKED in line for line in said):
        return ProvisionError(f"terraform {command}: {_who_holds(said)}", hint=f"try again when it has ended; {hint}")
    for found in (_API_ERROR.search(line) for line in said):
        known = explain(found[1], found[2]) if found and explain else None
        if known is not None and not isinstance(known, ProvisionError):
            return known
    if explain and any(_NO_CREDENTIALS.search(line) for line in said):
        return CredentialsError(text, hint="log in to AWS: `aws configure` or `aws sso login`")
    if any(_EXISTS.search(line) for line in said):
        return AlreadyThere(text, hint=hint)
    return ProvisionError(_humanly(command, said, explain), hint=hint)


_PLUGIN_HINT = (
    "let this machine reach Terraform's registry, or set GPUCLOUD_TF_PLUGIN_DIR to a folder with the provider in the"
    " version that gpucloud's lock names, packed as `terraform providers mirror` does"
)


def _who_holds(said: Sequence[str]) -> str:
    text = "\n".join(said)
    who, since = (re.search(rf"^\s*{word}:\s+(.+)$", text, re.MULTILINE) for word in ("Who", "Created"))
    return f"{who[1] if who else 'another run'} holds the lock on the state since {since[1] if since else 'a while'}"


def _humanly(command: str, said: Sequence[str], explain: Explain | None) -> str:
    """Return each line, with the cloud's code put first as one human line where it is known."""
    lines = []
    for line in said:
        found = _API_ERROR.search(line)
        known = explain(found[1], found[2]) if found and explain else None
        lines.append(known.message + (f" ({known.hint})" if known.hint else "") if known else line)
    return f"terraform {command}: " + "\n".join(dict.fromkeys(lines))
