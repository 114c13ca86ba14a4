"""How each job-file value is read: a plain value in, ours out; `Refused` or `Wanted` when the key does not take it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from typing import TypeVar

from gpucloud.domain.job import quantities
from gpucloud.domain.job.spec import OnNotice, Policy
from gpucloud.domain.node.member import parse_words
from gpucloud.domain.untrusted import quoted

E = TypeVar("E", bound=Enum)

AUTO_POLICY = "auto"
MOST_NODES = 64
NAME = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"
SECRET = r"[A-Z_][A-Z0-9_]*"  # noqa: S105  a pattern
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
REGION = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
GPU = r"[A-Za-z0-9][A-Za-z0-9._ -]*"
TYPE = r"(local\.)?[a-z0-9-]+\.[a-z0-9-]+"
_HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
HOST = rf"{_HOST_NAME}|[0-9A-Fa-f:]*:[0-9A-Fa-f:]+"
HOST_KEY = r"(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa) [A-Za-z0-9+/]+={0,2}"
MIG = r"[1-9]g\.[0-9]+gb(\+me)?"
KMS_KEY = r"(arn:[a-z0-9-]+:kms:[a-z0-9-]+:[0-9]{12}:key/)?[A-Za-z0-9-]+"
TOPIC = r"arn:[a-z0-9-]+:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_-]{1,256}"
_RANGE = re.compile(r"([0-9]{1,4}) ?- ?([0-9]{1,4})")
_STEPS = re.compile(r"([1-9][0-9]{0,11}) steps?")
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*/?")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Set for every worker by the launcher and by us: another value would break the job in ways that are hard to see.
_RESERVED = re.compile(r"(GROUP_|LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|GPUCLOUD_.*")


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Return a hint with the option most like `word`, if one is."""
    close = difflib.get_close_matches(word.lower(), options, n=1)
    return f'did you mean "{close[0]}"?' if close else None


def text(value: object) -> str:
    """Return a scalar as it is written; `Refused` for an empty one."""
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise Wanted("text")
    written = format(value, "f") if isinstance(value, Decimal) else str(value)
    if not written.strip():
        raise Refused("is empty")
    return _clean(written)


def text_or_empty(value: object) -> str:
    """Return a scalar as it is written, an empty one too."""
    return "" if value == "" else text(value)


def whole(low: int, high: int) -> Callable[[object], int]:
    """Return the reader of whole numbers from `low` to `high`."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Wanted(f"a whole number from {low} to {high}")
        return value

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """Any number of machines from `least` to `most`, which is more."""

    least: int
    most: int


def nodes(value: object) -> int | NodeRange:
    """Return a number of machines, or a range such as `2-4`."""
    if type(value) is int and 1 <= value <= MOST_NODES:
        return value
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise Wanted(f"a whole number from 1 to {MOST_NODES}, or a range such as 2-4")
    least, most = int(match[1]), int(match[2])
    if least >= most:
        near = f"write {least}" if least == most else f"write {most}-{least}"
        raise Refused(f"{quoted(match[0])} is no range: the smaller number comes first", hint=near)
    if least < 1 or most > MOST_NODES:
        raise Refused(f"{quoted(match[0])} is not within 1 to {MOST_NODES}")
    return NodeRange(least=least, most=most)


def one_of(options: type[E], otherwise: str | None = None) -> Callable[[object], E]:
    """Return the reader of the words that are an enum's values; `otherwise` is the hint where no word is near."""
    words = [str(option.value) for option in options]

    def read(value: object) -> E:
        word = text(value)
        if word not in words:
            raise Refused(f"{quoted(word)} is not one of {', '.join(words)}", hint=nearest(word, words) or otherwise)
        return options(word)

    return read


def on_notice(value: object) -> OnNotice:
    """Return `none` or a signal by its whole name."""
    word = text(value)
    words = {option.value.lower().removeprefix("sig"): option for option in OnNotice}
    if word in [option.value for option in OnNotice]:
        return OnNotice(word)
    near = words.get(word.lower().removeprefix("sig"))
    raise Refused(
        f"{quoted(word)} is not one of {', '.join(option.value for option in OnNotice)}",
        hint=f'did you mean "{near.value}"?' if near else nearest(word, words),
    )


def _clean(written: str) -> str:
    bad = _CONTROL.search(written)
    if bad:
        raise Refused(f"{quoted(written)} holds the control character U+{ord(bad[0]):04X}")
    return written


def line(value: object) -> str:
    """Return a scalar that is one line, as it is written."""
    written = text(value)
    if "\n" in written:
        raise Refused(f"{quoted(written)} is more than one line")
    return written


def matching(pattern: str, what: str) -> Callable[[object], str]:
    """Return the reader of lines that match a pattern; `what` is what they then are."""

    def read(value: object) -> str:
        written = line(value)
        if not re.fullmatch(pattern, written):
            raise Refused(f"{quoted(written)} is not {what}")
        return written

    return read


def name(value: object) -> str:
    """Return a job's name."""
    written = line(value)
    if re.fullmatch(NAME, written):
        return written
    near = re.sub(r"[^a-z0-9]+", "-", written.lower())[:40].strip("-")
    raise Refused(
        f"{quoted(written)} is not a name: a–z, 0–9 and hyphens inside, at most 40",
        hint=f'did you mean "{near}"?' if near else None,
    )


def kms_key(value: object) -> str:
    """Return a KMS key's id or ARN; `Refused` for an alias, which no policy can name."""
    written = line(value)
    if re.fullmatch(KMS_KEY, written):
        return written
    alias = re.search(r"alias/[A-Za-z0-9/_-]+$", written)
    raise Refused(
        f"{quoted(written)} is {'an alias' if alias else 'not a key'}: write the key's id or ARN",
        hint=f"aws kms describe-key --key-id {alias[0]} --query KeyMetadata.Arn" if alias else None,
    )


def usd(value: object) -> Decimal:
    """Return a sum of money above 0."""
    written = line(value)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", written):
        raise Refused(f"{quoted(written)} is not a sum of money", hint=f'did you mean "{written} USD"?')
    usd = quantities.parse_usd(written)
    if usd == 0:
        raise Refused("must be more than 0 USD")
    return usd


def usd_or_nothing(value: object) -> Decimal:
    """Return a sum of money, 0 included."""
    return quantities.parse_usd(line(value))


def percent(value: object) -> int:
    """Return whole percent, from 1 to 99, from a bare number too."""
    written = str(value) if type(value) is int else line(value)
    m = re.fullmatch(r"([1-9][0-9]?) ?%?", written)
    if m is None:
        raise Refused(f"{quoted(written)} is not a share from 1% to 99%")
    return int(m[1])


def times(value: object) -> float | None:
    """Return the number in `20x`, from 2 to 10,000; None for `never`."""
    written = line(value)
    if written == "never":
        return None
    m = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) ?x", written)
    if m is None or not 2 <= float(m[1]) <= 10_000:
        raise Refused(f"{quoted(written)} is not a multiple from 2x to 10000x, nor never", hint="write 20x, or never")
    return float(m[1])


def policy(value: object) -> Policy:
    """Return how a deadline is kept; `auto` is the learned policy."""
    names = (AUTO_POLICY, *(one.value for one in Policy))
    written = line(value)
    if written not in names:
        raise Refused(f"{quoted(written)} is not one of {', '.join(names)}", hint=nearest(written, names))
    return Policy.LEARNED if written == AUTO_POLICY else Policy(written)


def flag(value: object) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise Wanted("true or false")
    return value


def driver(value: object) -> str:
    """Return `auto`, `keep`, or the number of a driver branch."""
    written = str(value) if type(value) is int else line(value)
    if written in ("auto", "keep") or re.fullmatch(r"[4-9][0-9]{2}", written):
        return written
    raise Refused(
        f"{quoted(written)} is not auto, keep or a driver branch such as 580", hint=nearest(written, ("auto", "keep"))
    )


def url(value: object) -> str:
    """Return an http or https URL without a password in it, without a slash at its end."""
    written = line(value)
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", written):
        raise Refused(f"{quoted(written)} is not a URL such as https://mirror.example.com/pypi/simple")
    if "@" in written.split("/")[2]:
        raise Refused("a URL in a job file holds no password", hint="use `secrets` and the tool's own variables")
    return written.rstrip("/")


def host(value: object) -> object:
    """Return a host's keys, from `user@address:port` too."""
    if isinstance(value, dict):
        return value
    written = line(value)
    m = re.fullmatch(rf"((?P<user>[^@\s]+)@)?(?P<address>{_HOST_NAME})(:(?P<port>[0-9]{{1,5}}))?", written)
    if m is None:
        raise Refused(f"{quoted(written)} is not a host: write user@address:port")
    found = {key: text for key, text in m.groupdict().items() if text is not None}
    return {**found, **({"port": int(m["port"])} if m["port"] else {})}


def span(value: object) -> timedelta:
    """Return a span of at least a second."""
    span = quantities.parse_span(line(value))
    if span < timedelta(seconds=1):
        raise Refused("must be at least 1s")
    return span


def hold(value: object) -> timedelta:
    """Return a span of a minute to an hour; nothing for `none`."""
    written = line(value)
    if written == "none":
        return timedelta(0)
    if not re.match(r"[0-9.]*[1-9]", written):
        raise Refused(f"{quoted(written)} is no time to wait: from 1min to 1h, or none", hint='did you mean "none"?')
    held = span(value)
    if not timedelta(minutes=1) <= held <= timedelta(hours=1):
        raise Refused("must be from 1min to 1h, or none")
    return held


def gib(value: object) -> int:
    """Return whole GiB, from a bare number too."""
    gib = value if type(value) is int else quantities.parse_gib(line(value))
    if not 1 <= gib <= 4096:
        raise Refused("must be from 1 to 4096 GiB")
    return gib


def count(value: object) -> int:
    """Return how many, from `7B` too."""
    return value if type(value) is int and value > 0 else quantities.parse_count(line(value))


def cadence(value: object) -> timedelta | int | None:
    """Return a span, a number of steps, or None for auto."""
    written = line(value)
    if written == "auto":
        return None
    steps = _STEPS.fullmatch(written)
    if steps:
        return int(steps[1])
    try:
        return span(written)
    except ValueError as error:
        wanted = 'auto, a span of time such as "10 min", or "100 steps"'
        raise Refused(f"{quoted(written)} is not {wanted}", hint=nearest(written, ("auto",))) from error


def variable(value: object) -> str:
    """Return the name of an environment variable that the user may set."""
    name = matching(VARIABLE, "the name of an environment variable")(value)
    if _RESERVED.fullmatch(name):
        raise Refused(f"{name} is set by gpucloud")
    return name


def tag(value: object) -> str:
    """Return a tag's key."""
    written = line(value)
    if len(written) > 128:
        raise Refused(f"{quoted(written)} is longer than 128 characters")
    if written.lower().startswith(("aws:", "gpucloud:")):
        raise Refused(f"{quoted(written)} begins with a reserved prefix")
    return written


def tag_value(value: object) -> str:
    """Return a tag's value."""
    written = text_or_empty(value)
    if "\n" in written or len(written) > 256:
        raise Refused(f"{quoted(written)} is not one line of at most 256 characters")
    return written


def store(value: object) -> str:
    """Return `s3://bucket/prefix`, `file:///path` or a path."""
    written = line(value)
    if not re.match(r"\w+:/", written) or written.startswith("file:///"):
        return written
    if not _BUCKET.fullmatch(written):
        raise Refused(f"{quoted(written)} is not a place: write s3://bucket/prefix or a folder")
    return written.rstrip("/")


def target(value: object) -> str:
    """Return an absolute path on the nodes."""
    written = line(value)
    if not written.startswith("/") or ".." in written.split("/") or not written.strip("/"):
        raise Refused(f"{quoted(written)} is not an absolute path on the nodes, such as /data")
    return written


def output(value: object) -> str:
    """Return a relative path that stays inside."""
    written = line(value)
    if written.startswith(("/", "~")) or ".." in written.split("/"):
        raise Refused(f"{quoted(written)} is not a path inside the code folder")
    return written


def inside(value: object) -> str:
    """Return a folder below the code folder, without a slash at its end; `.` is the code folder itself."""
    parts = [part for part in output(value).split("/") if part not in ("", ".")]
    if any(part.startswith(".gpucloud-") for part in parts):
        raise Refused("names that begin with .gpucloud- are gpucloud's own")
    return "/".join(parts) or "."


def words(value: object) -> tuple[str, ...]:
    """Return the words of a command line: a text split as a shell does, or a list as it stands."""
    written = [text(item) for item in value] if isinstance(value, list) else parse_words(text(value))
    if not written:
        raise Refused("is empty")
    return tuple(written)


def file_name(value: object) -> str:
    """Return a file's name without a folder."""
    written = line(value)
    if "/" in written or written in (".", ".."):
        raise Refused(f"{quoted(written)} is not the name of a file: it is looked for in every folder")
    return written


def listed(value: object) -> object:
    """Return a list, made of a lone scalar where need be; its items are read later."""
    if isinstance(value, dict):
        raise Wanted("a list")
    if not isinstance(value, list):
        return (value,)
    scalars = [item for item in value if not isinstance(item, dict | list)]
    twice = next((item for at, item in enumerate(scalars) if item in scalars[:at]), None)
    if twice is not None:
        raise Refused(f"{quoted(str(twice))} is there twice")
    return value


def mapped(value: object) -> object:
    """Return a mapping; its keys and values are read later."""
    if not isinstance(value, dict):
        raise Wanted("a mapping of keys to values")
    return value


# What is wrong with a job file, before it is known how the file is called.


Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where something stands, counted from 1, and what is written there, or that it is "a list" or "a mapping"."""

    line: int
    column: int
    text: str = ""
    scalar: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong, at a key or a value."""

    path: Path
    location: Location
    message: str
    hint: str | None = None


class Unreadable(Exception):
    """The file cannot be read any further: one fault and no document."""

    def __init__(self, line: int, column: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.fault = Fault(path=(), location=Location(line=line, column=column), message=message, hint=hint)


class Refused(ValueError):
    """A value that its key does not take: a sentence that begins with the value, and perhaps a hint."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Wanted(ValueError):
    """A value of the wrong kind; the argument says what is wanted, as in "a whole number"."""
