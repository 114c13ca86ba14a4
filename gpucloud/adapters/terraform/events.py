"""What Terraform's `-json` lines say: the story for people, the errors and the outputs.

Format: https://developer.hashicorp.com/terraform/internals/machine-readable-ui. A line that is not a JSON object (a
warning about the CLI configuration, a log line) is passed over, and kept for when nothing else explains a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

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
