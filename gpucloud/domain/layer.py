"""When two jobs' layers on a node are the same, and when a job needs one at all."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from dataclasses import dataclass

BOTO3 = "boto3>=1.36"
"""What a store in S3 needs: the first with conditional writes (IfMatch on PutObject)."""

ISAL = "isal>=1.7"
"""What makes it cheaper, where there is a wheel of it: two fifths of a save's time on the CPU are CRC32 by zlib."""

# Lines of a requirements file (pip's reference, requirements file format), which conda's files hold as a list's.
_NESTED = re.compile(r"^[ \t]*(?:- +[\"']?)?(?:-r|-c|--requirement|--constraint)[ \t=]*([^\s#\"']+)", re.MULTILINE)
_INSTALLS_TREE = re.compile(
    rb"^[ \t]*(?:- +[\"']?)?(?:(?:-e|--editable)(?![ \t=]*\S*://)|\.{1,2}(?:[/\[\s]|$))", re.MULTILINE
)
_OF_THE_TREE = ("pyproject.toml", "setup.cfg", "setup.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWanted:
    """What a job wants of its Python: `always` a layer of its own (setup, conda), or one for what the base lacks.

    `digest` is the hash of all that the layer depends on, save what is the node's own.
    """

    digest: str
    always: bool
    boto3: bool
    torch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOrder:
    """A layer to be made: the user's commands, none if empty, run in `code` with `env` added, in a conda environment
    from the file `conda`, if there is one. Mirrors are URLs in place of the usual ones. `env` may hold secrets.
    """

    wanted: LayerWanted
    setup: str
    code: str
    conda: str = ""
    env: tuple[tuple[str, str], ...] = ()
    pip_mirror: str | None = None
    torch_mirror: str | None = None


def is_needed(wanted: LayerWanted, *, boto3: str | None, torch: str | None) -> bool:
    """Whether the job needs a layer where the base interpreter has these versions."""
    lacks = (wanted.boto3 and not suffices(boto3)) or (wanted.torch and torch is None)
    return wanted.always or lacks


def suffices(version: str | None) -> bool:
    """Whether this boto3 can write to a store; None is that there is none."""
    parts = re.match(r"(\d+)\.(\d+)", version or "")
    return parts is not None and (int(parts[1]), int(parts[2])) >= (1, 36)


def setup_files(setup: str) -> tuple[str, ...]:
    """Return the files that a setup text names and whose content decides what it installs, such as requirements.txt."""
    return tuple(dict.fromkeys(re.findall(r"[\w./-]+\.(?:txt|toml|lock|in|cfg|ya?ml)\b", setup)))


def nested_files(name: str, text: str) -> tuple[str, ...]:
    """Return the files of the tree that a requirements file names in its turn, by their paths in the tree."""
    found = (posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in _NESTED.findall(text))
    return tuple(dict.fromkeys(path for path in found if not path.startswith(("/", "../")) and ":" not in path))


def requirement_files(setup: str) -> tuple[str, ...]:
    """Return the files that may name packages: those in the text, and the tree's own where it is installed from."""
    return (*setup_files(setup), *(_OF_THE_TREE if setup_uses_tree(setup) else ()))


def setup_uses_tree(setup: str) -> bool:
    """Whether a setup text installs from the synced tree itself (`pip install -e .`, `./install.sh`)."""
    try:
        words = shlex.split(setup, comments=True)
    except ValueError:
        return True
    return any(map(_is_of_the_tree, words))


def _is_of_the_tree(word: str) -> bool:
    """Whether a word is a program or a package of the tree's own, in which more may count than can be told."""
    told = word in (".", "-e", "--editable", "make") or word.startswith(("./", "../", ".["))
    return told or (":" not in word and word.endswith((".sh", ".py", "/")))


def setup_digest(
    setup: str,
    files: tuple[tuple[str, bytes], ...],
    code: str,
    *,
    requirements: tuple[str, ...] = (),
    conda: bytes | None = None,
) -> str:
    """Return the hash of all that a layer depends on, save what is the node's own; `code` counts if the tree is used.

    `requirements` is what the layer must have beside what the setup installs; `conda` an environment file's content.
    Mirrors do not count: the same packages come from them.
    """
    uses_tree = setup_uses_tree(setup) or any(
        _INSTALLS_TREE.search(data) for data in (*dict(files).values(), conda or b"")
    )
    parts = [setup, code if uses_tree else ""]
    parts += [f"{name}={hashlib.sha256(data).hexdigest()}" for name, data in files]
    parts += requirements
    if conda is not None:
        parts.append(f"conda: {hashlib.sha256(conda).hexdigest()}")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def layer_key(digest: str, *, python: str, version: tuple[int, ...], platform: str, torch_index: str) -> str:
    """Return the layer's name: the same wishes on the same interpreter, platform and kind of GPU are the same layer."""
    parts = [digest, python, list(version), platform, torch_index]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
