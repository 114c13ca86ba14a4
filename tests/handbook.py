"""Writes the generated parts of the handbook again: `python -m tests.handbook`.

They are what `--help` says, wherever a page shows `$ gpucloud … --help`, and the table of the job file's keys.
tests/unit/test_handbook.py fails when they are stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

import gpucloud
from gpucloud.adapters.handbook import pages
from gpucloud.adapters.jobfile import json_schema, model
from gpucloud.cli.app import app
from gpucloud.domain.job.quantities import format_span

FOLDER = Path(gpucloud.__file__).resolve().parent / "docs"
KEYS = "## Every key\n\n"
_SHOWN_HELP = re.compile(r"^```console\n\$ (gpucloud(?: [a-z-]+)*) --help\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def written(text: str) -> str:
    """Return a page's text with its generated parts as they are now."""
    text = _SHOWN_HELP.sub(lambda found: f"```console\n$ {found[1]} --help\n{help_of(found[1])}```", text)
    before, mark, _ = text.partition(KEYS)
    return f"{before}{mark}{keys()}" if mark else text


def commands_shown(text: str) -> list[str]:
    """Return the commands whose help a page shows."""
    return [found[1] for found in _SHOWN_HELP.finditer(text)]


def help_of(command: str) -> str:
    """Return what a command's `--help` writes on 80 columns."""
    words = [*command.split()[1:], "--help"]
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, words, prog_name="gpucloud").stdout


def keys() -> str:
    """Return the table of the job file's keys: values, what counts where one is left out, what it says."""
    schema = json_schema()
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(model.JobKeys, schema, schema["$defs"], ""))
    return f"| key | values | left out | what it says |\n|---|---|---|---|\n{rows}"


def _rows(shown: type[BaseModel], schema: Any, shapes: Any, above: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in shown.model_fields.items():
        key = field.alias or name
        shape = schema["properties"][key]
        told = (field.description or "").replace("|", "\\|")
        below = _keys_below(field)
        values = _of_mapping(field, shape) if below is not None else _values(shape)
        yield f"`{above}{key}`", values, _left_out(field, below), told
        if below is not None:
            where = f"{above}{key}[]." if _is_list(field) else f"{above}{key}."
            yield from _rows(below, shapes[below.__name__], shapes, where)


def _of_mapping(field: FieldInfo, shape: Any) -> str:
    if _is_list(field):
        return "a list"
    return "a mapping, or `none`" if {"enum": ["none"]} in shape.get("anyOf", ()) else "a mapping"


def _is_list(field: FieldInfo) -> bool:
    return "tuple" in str(field.annotation)


def _keys_below(field: FieldInfo) -> type[BaseModel] | None:
    found = re.search(r"\.(\w+Keys)\b", str(field.annotation))
    return getattr(model, found[1]) if found else None


def _values(shape: Any) -> str:
    examples = shape.get("examples")
    if "enum" in shape:
        return ", ".join(f"`{value}`" for value in shape["enum"])
    if examples:
        return "such as " + ", ".join(f"`{_plain(value)}`" for value in examples)
    if "anyOf" in shape:
        kinds = [_values(one) for one in shape["anyOf"]]
        return " or ".join(dict.fromkeys(kinds))
    match shape.get("type"):
        case "integer":
            return _between("a number", shape)
        case "boolean":
            return "`true`, `false`"
        case "array":
            return f"a list of {_values(shape['items'])}" if "items" in shape else "a list"
        case "object":
            return "a mapping"
        case _:
            return "text"


def _between(kind: str, shape: Any) -> str:
    low, high = shape.get("minimum"), shape.get("maximum")
    return f"{kind}, {low} to {high}" if low is not None and high is not None else kind


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _left_out(field: FieldInfo, below: type[BaseModel] | None) -> str:
    if field.is_required():
        return "**must be there**"
    value = field.default
    if below is not None or value is PydanticUndefined or value is None or value == ():
        return ""
    return f"`{_as_written(value)}`"


def _as_written(value: object) -> str:
    match value:
        case Enum():
            return str(value.value)
        case bool():
            return str(value).lower()
        case Decimal():
            return f"{value} USD"
        case timedelta():
            return format_span(value)
        case float():
            return f"{value:g}x"
        case _:
            return str(value)


def main() -> None:
    for page in pages():
        (FOLDER / f"{page.name}.md").write_text(written(page.text), encoding="utf-8")


if __name__ == "__main__":
    main()
