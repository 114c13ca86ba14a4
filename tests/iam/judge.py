"""IAM's verdict: whether policies, under a boundary, allow what a call needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.iam import reference

Document = dict[str, Any]
Context = Mapping[str, "str | tuple[str, ...]"]
_Met = Mapping[str, "tuple[str, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One action on one resource. `kind` is the reference's resource type, empty where it has none."""

    action: str
    arn: str = "*"
    kind: str = ""
    context: Context = field(default_factory=dict)

    @property
    def judged_by(self) -> dict[str, tuple[str, ...]]:
        """The context that AWS has for this action on this resource, by key in lower case."""
        return {
            key.lower(): (value,) if isinstance(value, str) else tuple(value)
            for key, value in self.context.items()
            if reference.knows(self.action, self.kind, key)
        }

    def __str__(self) -> str:
        told = ", ".join(f"{key}={','.join(value)}" for key, value in sorted(self.judged_by.items()))
        return f"{self.action} on {self.arn} ({told})"


@dataclass(frozen=True, slots=True)
class Rights:
    """What somebody may do: the statements of his policies, and those of a boundary around them."""

    statements: tuple[Document, ...]
    boundary: tuple[Document, ...] | None = None

    @classmethod
    def of(cls, documents: Iterable[Document], boundary: Document | None = None) -> Rights:
        """Return the rights that documents give."""
        every = tuple(statement for document in documents for statement in statements_of(document))
        return cls(every, None if boundary is None else statements_of(boundary))

    def allow(self, need: Need) -> bool:
        """Whether the need is allowed: by a policy and by the boundary, and denied by neither."""
        sides = [self.statements] if self.boundary is None else [self.statements, self.boundary]
        if any(one["Effect"] == "Deny" and meets(one, need) for side in sides for one in side):
            return False
        return all(any(one["Effect"] == "Allow" and meets(one, need) for one in side) for side in sides)

    def refused(self, needs: Iterable[Need]) -> Need | None:
        """Return the first need that is not allowed; None when all are."""
        return next((need for need in needs if not self.allow(need)), None)


def statements_of(document: Document) -> tuple[Document, ...]:
    """Return a policy's statements."""
    return tuple(_list(document["Statement"]))


def meets(statement: Document, need: Need) -> bool:
    """Whether the statement speaks of the need. NotImplementedError: it says what this judge does not know."""
    if unknown := set(statement) - {"Sid", "Effect", "Action", "Resource", "Condition", "Principal"}:
        raise NotImplementedError(f"the judge does not know {', '.join(sorted(unknown))}")
    if not any(_pattern(one.lower(), {}).fullmatch(need.action.lower()) for one in _list(statement["Action"])):
        return False
    context = need.judged_by
    if not any(_pattern(one, context).fullmatch(need.arn) for one in _list(statement.get("Resource", "*"))):
        return False
    return all(
        _holds(operator, context.get(key.lower()), [str(one) for one in _list(value)], context)
        for operator, pairs in statement.get("Condition", {}).items()
        for key, value in pairs.items()
    )


def _holds(operator: str, said: tuple[str, ...] | None, wanted: list[str], context: _Met) -> bool:
    name = operator
    quantifier, _, rest = name.rpartition(":")
    name, if_exists = (rest.removesuffix("IfExists"), rest.endswith("IfExists"))
    if name == "Null":
        return str(said is None).lower() in [one.lower() for one in wanted]
    negative = "Not" in name
    positive = name.replace("NotEquals", "Equals").replace("NotLike", "Like")
    if said is None or (not said and quantifier):
        return if_exists or negative or quantifier == "ForAllValues"
    hits = [any(_compare(positive, one, value, context) for value in wanted) != negative for one in said]
    return all(hits) if quantifier == "ForAllValues" else any(hits)


def _compare(operator: str, said: str, pattern: str, context: _Met) -> bool:
    wanted = "".join(text for _, text in _parts(pattern, context))
    match operator:
        case "StringEquals":
            return said == wanted
        case "StringEqualsIgnoreCase" | "Bool":
            return said.lower() == wanted.lower()
        case "StringLike" | "ArnLike" | "ArnEquals":
            return _pattern(pattern, context).fullmatch(said) is not None
        case "NumericEquals":
            return float(said) == float(wanted)
        case "NumericLessThanEquals":
            return float(said) <= float(wanted)
        case "NumericLessThan":
            return float(said) < float(wanted)
        case "NumericGreaterThanEquals":
            return float(said) >= float(wanted)
        case _:
            raise NotImplementedError(f"the judge does not know the condition {operator}")


def _parts(pattern: str, context: _Met) -> list[tuple[bool, str]]:
    """Split into what is meant literally and what may hold wildcards; a variable that the request lacks meets nothing.

    What a variable stands for is never a wildcard, and `${*}` is the character (IAM user guide, policy variables).
    """
    split = re.split(r"\$\{([^}]+)\}", pattern)
    return [
        (True, one if one in {"*", "?", "$"} else "".join(context.get(one.lower(), ("\0",)))) if odd else (False, one)
        for place, one in enumerate(split) for odd in (place % 2,)
    ]  # fmt: skip


def _pattern(pattern: str, context: _Met) -> re.Pattern[str]:
    return _compiled(tuple(_parts(pattern, context)))


@cache
def _compiled(parts: tuple[tuple[bool, str], ...]) -> re.Pattern[str]:
    wild = {"*": ".*", "?": "."}
    return re.compile(
        "".join(
            re.escape(text) if literal else "".join(wild.get(char) or re.escape(char) for char in text)
            for literal, text in parts
        ),
        re.DOTALL,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
