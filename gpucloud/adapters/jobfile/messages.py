"""Pydantic's findings, in our words and at their place in the file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from gpucloud.adapters.jobfile.document import NO_KEY, Document
from gpucloud.adapters.jobfile.fault import Fault, Location, Path, Refused, Wanted
from gpucloud.adapters.jobfile.model import JobKeys
from gpucloud.adapters.jobfile.rules import KEY
from gpucloud.adapters.jobfile.values import nearest
from gpucloud.domain.untrusted import brief, quoted


def sections(model: type[BaseModel], path: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Yield the model and every mapping of keys in it, with the keys that lead there; items of a list have no index."""
    yield path, model
    for name, shape in model.model_fields.items():
        for inner in _models_in(shape.annotation):
            yield from sections(inner, (*path, shape.alias or name))


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


_MODELS: Mapping[Path, type[BaseModel]] = dict(sections(JobKeys))


def faults(error: ValidationError, document: Document) -> Iterator[Fault]:
    """Yield one fault for each of pydantic's findings."""
    for finding in error.errors(include_url=False):
        yield _fault(finding["type"], finding["loc"], finding.get("ctx", {}), document)


def shown(path: Path) -> str:
    """Return the path as people write it: `resources.gpu[0]`, `data["s3://bucket/set"]`."""
    return "".join(map(_step, path)).removeprefix(".")


def _step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    if part == NO_KEY:
        return ""
    return f".{part}" if re.fullmatch(r"[\w-]{1,60}", part) else f"[{quoted(part)}]"


def _fault(kind: str, place: Path, context: Mapping[str, Any], document: Document) -> Fault:
    if place and place[-1] == KEY:
        path = place[:-1]
        return _refusal(path, document.keys[path], context.get("error"))
    if kind == "missing":
        return Fault(path=place, location=document.place(place[:-1]), message="is required")
    if kind == "extra_forbidden":
        return Fault(path=place, location=document.keys[place], message="is not a key here", hint=_nearest_key(place))
    path = document.known(place)
    return _refusal(path, document.values[path], context.get("error"))


def _refusal(path: Path, location: Location, error: object) -> Fault:
    if isinstance(error, Wanted):
        return _wrong_kind(path, location, str(error))
    hint = error.hint if isinstance(error, Refused) else None
    return Fault(path=path, location=location, message=str(error), hint=hint)


def _wrong_kind(path: Path, location: Location, wanted: str) -> Fault:
    hint = None
    if location.scalar and wanted == "text":
        hint = f"without quotes it means yes or no in YAML: write {quoted(location.text)}"
    elif re.fullmatch(r'"[0-9]+"', location.text):
        hint = "remove the quotes"
    return Fault(path=path, location=location, message=f"must be {wanted}, not {brief(location.text)}", hint=hint)


def _nearest_key(place: Path) -> str | None:
    """Return a hint with the key that was probably meant, here or in another mapping."""
    here, word = tuple(part for part in place[:-1] if isinstance(part, str)), str(place[-1])
    if (here, word) == (("checkpoint",), "none"):
        return "without braces: `checkpoint: none`"
    for path, model in _MODELS.items():
        if word in _keys(model):
            return f'did you mean "{shown((*path, word))}"?'
    for path in (here, *(other for other in _MODELS if other != here)):
        hint = nearest(word, _dotted(path, _keys(_MODELS[path]), here))
        if hint:
            return hint
    return None


def _keys(model: type[BaseModel]) -> list[str]:
    return [shape.alias or name for name, shape in model.model_fields.items()]


def _dotted(model: Path, keys: Iterable[str], here: Path) -> list[str]:
    return list(keys) if model == here else [shown((*model, key)) for key in keys]
