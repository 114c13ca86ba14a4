"""What Terraform says: its `-json` lines as a story, and what its failures mean.

Format: https://developer.hashicorp.com/terraform/internals/machine-readable-ui. A line that is not a JSON object (a
warning about the CLI configuration, a log line) is passed over, and kept for when nothing else explains a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError, ToolMissing

Event = Mapping[str, Any]

_DOING = {"create": "making", "update": "changing", "delete": "removing", "read": "reading"}
_DONE = {"add": "made", "change": "changed", "remove": "removed"}
_LOCAL_EXEC = re.compile(r"Error running command '.*?': (exit status \d+)\. Output: (.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def parse(line: str) -> Event | None:
    """Return the event on this line, if there is one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def tell(event: Event) -> str | None:
    """Return the line that people get to see for this event, if any."""
    kind, hook = event.get("type"), event.get("hook", {})
    address = hook.get("resource", {}).get("addr")
    action = str(hook.get("action"))
    if kind == "change_summary":
        return _summary(event["changes"])
    if kind == "apply_progress":
        return f"Terraform is {_DOING.get(action, 'at')} {address} ({hook.get('elapsed_seconds')} s)"
    if kind == "diagnostic" and event["diagnostic"].get("severity") == "warning":
        return f"Terraform warns: {event['diagnostic'].get('summary')}"
    return None


def errors(events: Iterable[Event]) -> tuple[str, ...]:
    """Return each error as `address: text`, in our shape; a failed local command gives its own output."""
    return tuple(
        _error(event["diagnostic"])
        for event in events
        if event.get("type") == "diagnostic" and event["diagnostic"].get("severity") == "error"
    )


def outputs(events: Iterable[Event]) -> dict[str, Any]:
    """Return the outputs' values after an apply, by name."""
    found: dict[str, Any] = {}
    for event in events:
        if event.get("type") == "outputs":
            found = {name: output.get("value") for name, output in event["outputs"].items()}
    return found


def addresses(shown: Iterable[Event]) -> tuple[str, ...]:
    """Return the addresses in a `show -json` answer, those of child modules too."""
    modules = [event.get("values", {}).get("root_module", {}) for event in shown]
    found: list[str] = []
    while modules:
        module = modules.pop()
        found += [resource["address"] for resource in module.get("resources", ())]
        modules += module.get("child_modules", ())
    return tuple(sorted(found))


def plain(text: str) -> str:
    """Return the lines that are not events, without colours, at most the last 400 characters."""
    lines = (_COLOUR.sub("", line).strip(" │╷╵\t") for line in text.splitlines() if parse(line) is None)
    return " ".join(line for line in lines if line)[-400:]


def _summary(changes: Mapping[str, Any]) -> str | None:
    """Say what was done, once it is done; a plan is only on its way to that."""
    done = ", ".join(f"{word} {changes[kind]}" for kind, word in _DONE.items() if changes.get(kind))
    return f"Terraform {done}" if done and changes.get("operation") != "plan" else None


def _error(diagnostic: Mapping[str, Any]) -> str:
    detail = str(diagnostic.get("detail") or "").strip()
    local = _LOCAL_EXEC.fullmatch(detail)
    text = (local[2].strip() or local[1]) if local else f"{diagnostic.get('summary')}: {detail}".removesuffix(": ")
    address = diagnostic.get("address")
    return f"{address}: {text}" if address else text


# What a failed Terraform command means: who must act, and how.


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
