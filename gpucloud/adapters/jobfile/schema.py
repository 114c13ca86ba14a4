"""The job file as JSON Schema, for editors: `gpucloud schema`."""

from __future__ import annotations

from typing import Any

from gpucloud.adapters.jobfile.model import JobKeys


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file; every key has its description."""
    schema = _plain(JobKeys.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gpucloud job", **schema}


def _plain(node: Any) -> Any:
    """Return the schema without made-up titles, and without null: a key with no value is refused."""
    if isinstance(node, list):
        return [_plain(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    kept = {key: _plain(value) for key, value in node.items() if not _made_up(key, value)}
    only = kept.get("anyOf", ())
    return {**{key: value for key, value in kept.items() if key != "anyOf"}, **only[0]} if len(only) == 1 else kept


def _made_up(key: str, value: object) -> bool:
    return (key == "title" and isinstance(value, str)) or (
        key == "default" and (value is None or isinstance(value, dict))
    )
