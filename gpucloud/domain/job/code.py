"""A code folder as a manifest under one name, and which of its files stay at home (gitignore's rules)."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

LARGEST_CODE_BYTES = 64 << 20
"""Of what the store keeps: larger code is left to the supervisor, which sends only what a node lacks."""

FILE = 0o100644
PROGRAM = 0o100755
LINK = 0o120777
FOLDER = 0o040755


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, link or empty folder; `path` is relative, its parts joined by `/`.

    As in git, `mode` is one of four values, so that two machines with different umasks agree, and a
    link's content is its target. A folder has no content (`sha256` None); only empty ones are listed.
    """

    path: str
    size: int
    mtime_ns: int
    mode: int
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Every entry of a tree, sorted by path; make it with `manifest`."""

    entries: tuple[Entry, ...]

    @property
    def sha256(self) -> str:
        """The tree's name: over paths, modes and contents; times do not count."""
        digest = hashlib.sha256()
        for entry in self.entries:
            # A path cannot hold a NUL, so the lines cannot be read in two ways.
            line = f"{entry.mode:o} {entry.sha256 or '-'} {entry.path}\0"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def without(self, path: str) -> Manifest:
        """Return it without the file of that path; itself where it has none."""
        return Manifest(entries=tuple(entry for entry in self.entries if entry.path != path))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCode:
    """A code folder as one object: its tree's name, and what a receiver makes it of, None where it is too large.

    `own_sha256` is the tree's name without the job file that lies in it: what the code is, whatever that file says.
    """

    sha256: str
    own_sha256: str
    packed: bytes | None


def manifest(entries: tuple[Entry, ...]) -> Manifest:
    """Return the manifest of a tree with these entries."""
    return Manifest(entries=tuple(sorted(entries, key=lambda entry: entry.path)))


def files_in(packed: bytes) -> dict[str, str]:
    """Return the files of a packed tree by their paths, each with what tells it from another.

    Raises ValueError for what is no packed tree.
    """
    header, _, rest = packed.partition(b"\n")
    try:
        rows = json.loads(zlib.decompressobj().decompress(rest[: json.loads(header)[0]], LARGEST_CODE_BYTES))
        return {str(path): f"{mode} {sha256}" for path, _size, _mtime_ns, mode, sha256 in rows}
    except (zlib.error, LookupError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def beside(code: str, sha256: str) -> str:
    """Return where the tree of that name lies on a machine that has another at `code`.

    A name that is none comes from a state that machines can write: `code` itself then.
    """
    return str(PurePosixPath(code).with_name(sha256)) if is_name(sha256) else code


def is_name(sha256: str) -> bool:
    """Return whether that is how a tree is called."""
    return re.fullmatch(r"[0-9a-f]{64}", sha256) is not None


# Which files of a code folder stay at home: the rules of gitignore(5).


SETUPS = ".gpucloud-setup"
"""A folder in a tree of code on a node, in which its agent notes what was set up there: no code, and no output."""
ALWAYS = (".git", "__pycache__", SETUPS)
RESULTS_MARK = ".gpucloud-results"
"""A file that marks a folder as results that came home: they are no code, and change none by their coming."""


def results_folder(job_file: Path, run: str) -> Path:
    """Return where results of a run come home to, beside its job file."""
    return job_file.parent / "outputs" / run


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One line of an ignore file; `regex` matches a path below the root, parts joined by `/`."""

    regex: re.Pattern[str]
    negated: bool
    folders_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoreRules:
    """The patterns in force in one folder: its own file's last, since the last match decides."""

    patterns: tuple[Pattern, ...] = ()

    def ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path` stays at home. Ask for a folder first: what lies in an ignored one is ignored."""
        if path.rpartition("/")[2] in ALWAYS:
            return True
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.folders_only) and pattern.regex.fullmatch(path):
                return not pattern.negated
        return False

    def with_file(self, folder: str, text: str) -> IgnoreRules:
        """Return the rules below `folder` (`""` is the root), whose ignore file holds `text`."""
        parsed = (_parse(line, folder) for line in text.split("\n"))
        return IgnoreRules(patterns=self.patterns + tuple(pattern for pattern in parsed if pattern))


def _parse(line: str, folder: str) -> Pattern | None:
    glob = _without_trailing_spaces(line.removesuffix("\r"))
    if not glob or glob.startswith("#"):
        return None
    negated = glob.startswith("!")
    glob = glob[1:] if negated else glob
    folders_only = glob.endswith("/")
    glob = glob[:-1] if folders_only else glob
    if not glob:
        return None
    anchored = "/" in glob
    body = _translate(glob[1:] if glob.startswith("/") else glob)
    if body is None:
        return None
    base = re.escape(folder) + "/" if folder else ""
    regex = re.compile(base + ("" if anchored else "(?:.*/)?") + body, re.DOTALL)
    return Pattern(regex=regex, negated=negated, folders_only=folders_only)


def _without_trailing_spaces(line: str) -> str:
    """Trailing spaces do not count unless a backslash stands before them."""
    end = len(line)
    while end and line[end - 1] == " ":
        backslashes = len(line[: end - 1]) - len(line[: end - 1].rstrip("\\"))
        if backslashes % 2:
            break
        end -= 1
    return line[:end]


def _translate(glob: str) -> str | None:
    """Return the regular expression of a glob; None when git lets it match nothing (a lone `[`, a last backslash)."""
    regex: list[str] = []
    at = 0
    while at < len(glob):
        piece = _stars(glob, at) or _bracket(glob, at) or _single(glob, at)
        if piece is None:
            return None
        text, at = piece
        regex.append(text)
    return "".join(regex)


def _stars(glob: str, at: int) -> tuple[str, int] | None:
    """`**` spans folders where it is a whole part of the path; elsewhere it is one star."""
    if glob[at] != "*":
        return None
    end = at
    while end < len(glob) and glob[end] == "*":
        end += 1
    # git compares what stands before the first special character apart, so that `a**/b` spans folders too.
    starts_part = glob[:at].endswith("/") or ("/" in glob and not set(glob[:at]) & set("*?[\\")) or at == 0
    if end - at >= 2 and starts_part:
        if glob[end : end + 1] == "/":
            return "(?:.*/)?", end + 1
        if end == len(glob):
            return ".*", end
    return "[^/]*", end


def _bracket(glob: str, at: int) -> tuple[str, int] | None:
    if glob[at] != "[":
        return None
    members: list[str] = []
    start = at + 2 if glob[at + 1 : at + 2] in ("!", "^") else at + 1
    end = start
    while end < len(glob) and (glob[end] != "]" or end == start):
        named = re.compile(r"\[:(\w+):\]").match(glob, end)
        if named:
            members.append(_CLASSES.get(named[1], ""))
            end = named.end()
        else:
            text, end = _member(glob, end)
            members.append(text)
    if end >= len(glob):
        return None
    if not any(members):
        return ("[^/]" if start == at + 2 else "(?!)"), end + 1
    # A class never matches the separator.
    sign = "^/" if start == at + 2 else ""
    return f"(?!/)[{sign}{''.join(members)}]", end + 1


_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\s",
    "xdigit": "0-9a-fA-F",
    "punct": r"!-/:-@\[-`{-~",
}


def _member(glob: str, at: int) -> tuple[str, int]:
    """Return one character of a class, or one range; of one that runs backwards git takes the first character."""
    low, end = _literal(glob, at)
    if glob[end : end + 1] == "-" and glob[end + 1 : end + 2] not in ("]", ""):
        high, end = _literal(glob, end + 1)
        return (f"{re.escape(low)}-{re.escape(high)}" if low <= high else re.escape(low)), end
    return re.escape(low), end


def _literal(glob: str, at: int) -> tuple[str, int]:
    if glob[at] == "\\" and at + 1 < len(glob):
        return glob[at + 1], at + 2
    return glob[at], at + 1


def _single(glob: str, at: int) -> tuple[str, int] | None:
    match glob[at]:
        case "?":
            return "[^/]", at + 1
        case "[":
            return None
        case "\\":
            return (re.escape(glob[at + 1]), at + 2) if at + 1 < len(glob) else None
        case character:
            return re.escape(character), at + 1


# Patterns of `cp` and `outputs:`, as glob on a node reads them.


_FOUND_DEPTH = 100


def is_pattern(path: str) -> bool:
    """Whether it is to be matched by glob."""
    return any(char in path for char in "*?[")


def fits_pattern(pattern: str, named: str) -> bool:
    """Whether a path is one that glob finds by the pattern; that of a folder may end in `/`, and must for some."""
    wanted, parts = _parts_of(pattern), _parts_of(named)
    if len(parts) > _FOUND_DEPTH or not is_pattern(pattern):
        return False
    is_folder = f"/{named}".endswith(("/", "/."))
    if pattern.rstrip("/").endswith("/.") and not is_folder:
        return False
    if pattern.startswith("~"):
        return any(_parts_fit(wanted[1:], parts[at:], is_folder=is_folder) for at in range(1, len(parts)))
    return pattern.startswith("/") == named.startswith("/") and _parts_fit(wanted, parts, is_folder=is_folder)


def _parts_of(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _parts_fit(wanted: list[str], parts: list[str], *, is_folder: bool) -> bool:
    """Whether the parts of a name fit those of a pattern; each pair of ends is looked at once, however many `**`."""

    @cache
    def fit(i: int, j: int) -> bool:
        if j == len(parts):  # a last `**` finds all that is in a folder, and the folder
            return i == len(wanted) or (is_folder and set(wanted[i:]) == {"**"})
        if i == len(wanted):
            return False
        hidden = parts[j].startswith(".")
        if wanted[i] == "**":
            ends = not hidden and (i + 1, j + 1) == (len(wanted), len(parts))
            return ends or fit(i + 1, j) or (not hidden and fit(i, j + 1))
        hidden = hidden and not wanted[i].startswith(".")
        return not hidden and fnmatchcase(parts[j], wanted[i]) and fit(i + 1, j + 1)

    return fit(0, 0)
