"""A YAML document as plain values, each with its place in the file.

Built from PyYAML's events, so that nothing is constructed, aliases cannot grow, and nesting has a bound. Unquoted
words mean what YAML 1.1 says (`no` is false); dates, sexagesimal numbers and the like stay text. A number keeps the
way it is written: 1.10 is `Decimal("1.10")`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gpucloud.adapters.jobfile.model import JobKeys
from gpucloud.adapters.jobfile.rules import KEY
from gpucloud.adapters.jobfile.values import Fault, Location, Path, Refused, Unreadable, Wanted, nearest
from gpucloud.domain.job.spec import Access
from gpucloud.domain.untrusted import brief, quoted

_DEEPEST = 12
NO_KEY = "\0"  # no file holds it
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"yes|Yes|YES|true|True|TRUE|on|On|ON")
_FALSE = re.compile(r"no|No|NO|false|False|FALSE|off|Off|OFF")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}")
_MESSAGES = (
    ("found character '\\t'", "a tab cannot begin a word: YAML is indented with spaces"),
    ("mapping values are not allowed", "a colon is not expected here: indent it as the line above, or quote the text"),
    ("could not find expected ':'", "a colon is missing after the key above this line"),
    ("or '}', but got '{'", "a brace is not expected here: quote the text that has it"),
    ("found unexpected end of stream", "a quote is opened and never closed"),
)


@dataclass(slots=True)
class Document:
    """The file's values (mapping, list, str, int, Decimal, bool, None), where keys and values stand, and faults."""

    root: Any = None
    values: dict[Path, Location] = field(default_factory=dict)
    keys: dict[Path, Location] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def place(self, path: Path) -> Location:
        """Return where the value at `path` stands, or the nearest value around it."""
        return self.values[self.known(path)]

    def known(self, path: Path) -> Path:
        """Return the longest beginning of `path` that stands in the file."""
        while path and path not in self.values:
            path = path[:-1]
        return path


def parse(text: str) -> Document:
    """Return the text's only document; `Unreadable` when it is not YAML."""
    match = _UNPRINTABLE.search(text)
    if match is not None:
        before = text[: match.start()]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise Unreadable(line, column, f"a character that text does not have: U+{ord(match[0]):04X}")
    return _Builder(_events(text)).document()


def _events(text: str) -> list[Any]:
    loader = yaml.SafeLoader(text)
    events: list[Any] = []
    depth = 0
    try:
        while loader.check_event():
            event = loader.get_event()  # type: ignore[no-untyped-call]
            events.append(event)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                # At once, since PyYAML's time grows with the square of the depth.
                place = _location(event)
                raise Unreadable(place.line, place.column, f"nested more than {_DEEPEST} deep")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise Unreadable(line, column, _in_our_words(error)) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets chr() fail on "\U00110000".
        mark = loader.get_mark()
        raise Unreadable(mark.line + 1, mark.column + 1, "this cannot be read as YAML") from error
    finally:
        loader.dispose()
    return events


class _Builder:
    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self._at = 0
        self._found = Document()

    def document(self) -> Document:
        self._next()  # the stream's start
        if self._ahead(yaml.StreamEndEvent):
            raise Unreadable(1, 1, "the file is empty", "gpucloud init writes a sample")
        self._next()  # the document's start
        self._found.root = self._node(())
        self._next()  # the document's end
        if not self._ahead(yaml.StreamEndEvent):
            location = _location(self._events[self._at])
            raise Unreadable(location.line, location.column, "a second document begins here: one file is one job")
        return self._found

    def _node(self, path: Path) -> Any:
        event = self._next()
        location = _location(event)
        self._found.values.setdefault(path, location)
        if isinstance(event, yaml.AliasEvent):
            return self._refuse(
                path, location, f"*{brief(str(event.anchor))} is an alias, which is not read here: write the value out"
            )
        if event.anchor is not None:
            self._refuse(path, location, f"&{brief(str(event.anchor))} is an anchor, which is not read here: remove it")
        if event.tag is not None:
            self._refuse(path, location, "a value with a YAML tag (!…) is not read here: remove the tag")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._scalar(path, event, location)

    def _mapping(self, path: Path) -> dict[str, Any]:
        built: dict[str, Any] = {}
        while not self._ahead(yaml.MappingEndEvent):
            key, location = self._key(path)
            here = (*path, key)
            if key in built:
                self._refuse(here, location, f"is there twice, first on line {self._found.keys[here].line}")
                self._node(here)
            elif key == NO_KEY:
                self._node(here)
            else:
                self._found.keys[here] = location
                built[key] = self._node(here)
        self._next()
        return built

    def _key(self, path: Path) -> tuple[str, Location]:
        """Return the next key as it is written, whatever YAML would make of it; `NO_KEY` when it is not a word."""
        event = self._events[self._at]
        location = _location(event)
        if not isinstance(event, yaml.ScalarEvent):
            known = len(self._found.faults)
            self._node((*path, NO_KEY))
            del self._found.faults[known:]
            self._refuse(path, location, "a key must be a word")
            return NO_KEY, location
        self._next()
        if event.anchor is not None or event.tag is not None:
            self._refuse((*path, event.value), location, "a key has no anchor and no tag")
        if event.value == "<<" and event.style is None:
            self._refuse(path, location, "<< merges another mapping, which is not read here: write the keys out")
            return NO_KEY, location
        return event.value, location

    def _sequence(self, path: Path) -> list[Any]:
        built: list[Any] = []
        while not self._ahead(yaml.SequenceEndEvent):
            built.append(self._node((*path, len(built))))
        self._next()
        return built

    def _scalar(self, path: Path, event: yaml.ScalarEvent, location: Location) -> Any:
        value = _meaning(event.value) if event.style is None else event.value
        if value is None:
            self._refuse(path, self._found.keys.get(path, location), "has no value: write one, or remove the key")
        return value

    def _next(self) -> Any:
        self._at += 1
        return self._events[self._at - 1]

    def _ahead(self, kind: type[yaml.Event]) -> bool:
        return isinstance(self._events[self._at], kind)

    def _refuse(self, path: Path, location: Location, message: str) -> None:
        self._found.faults.append(Fault(path=path, location=location, message=message))


def _meaning(text: str) -> str | int | Decimal | bool | None:
    """Return what an unquoted word means."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return bool(_TRUE.fullmatch(text))
    if _INTEGER.fullmatch(text):
        return int(text)
    return Decimal(text) if _DECIMAL.fullmatch(text) else text


def _location(event: Any) -> Location:
    line, column = event.start_mark.line + 1, event.start_mark.column + 1
    if isinstance(event, yaml.ScalarEvent):
        text = event.value if event.style is None else quoted(event.value)
        return Location(line=line, column=column, text=text)
    text = "a mapping" if isinstance(event, yaml.MappingStartEvent) else "a list"
    return Location(line=line, column=column, text=text, scalar=False)


def _in_our_words(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    for theirs, ours in _MESSAGES:
        if theirs in problem:
            return ours
    return f"this is not YAML: {brief(problem, 100)}"


# Pydantic's findings, in our words and at their place in the file.


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


_ACCESS = [word.value for word in Access]
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
    if path == ("ssh",) and location.text in _ACCESS:
        hint = f"did you mean `aws: {{access: {location.text}}}`?"
    elif location.scalar and wanted == "text":
        hint = f"without quotes it means yes or no in YAML: write {quoted(location.text)}"
    elif re.fullmatch(r'"[0-9]+"', location.text):
        hint = "remove the quotes"
    return Fault(path=path, location=location, message=f"must be {wanted}, not {brief(location.text)}", hint=hint)


def _nearest_key(place: Path) -> str | None:
    """Return a hint with the key that was probably meant, here or in another mapping."""
    here, word = tuple(part for part in place[:-1] if isinstance(part, str)), str(place[-1])
    if (here, word) == (("checkpoint",), "none"):
        return "without braces: `checkpoint: none`"
    if (here, word) == (("aws",), "ssh"):
        return 'did you mean "access"?'
    word = re.sub("_count$", "s", word)  # as others call theirs: gpu_count, node_count
    if here in _MODELS and word in _keys(_MODELS[here]):
        return f'did you mean "{word}"?'
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
