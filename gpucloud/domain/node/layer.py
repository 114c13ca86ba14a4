"""A job's Python layer on a node: when two are the same, when one is needed, which torch fits, which tools make it."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise

from gpucloud.domain.node.hardware import is_older, least_driver

BOTO3 = "boto3>=1.36"
"""What a store in S3 needs: the first with conditional writes (IfMatch on PutObject)."""

ISAL = "isal>=1.7"
"""What makes it cheaper, where there is a wheel of it: two fifths of a save's time on the CPU are CRC32 by zlib."""

# Lines of a requirements file (pip's reference, requirements file format), which conda's files hold as a list's.
_NESTED = re.compile(r"^[ \t]*(?:- +[\"']?)?(?:-r|-c|--requirement|--constraint)[ \t=]*([^\s#\"']+)", re.MULTILINE)
_OF_THE_TREE = ("pyproject.toml", "setup.cfg", "setup.py")
_FILE_OPTIONS = ("-r", "-c", "--requirement", "--requirements", "--constraint", "--constraints")
_FILE_IN_OPTION = re.compile(r"(?:-[rc]|--requirements?=|--constraints?=)(.+)")
_LOCAL_OPTIONS = ("-e", "-f", "--editable", "--find-links")
_LOCAL_IN_OPTION = re.compile(r"(?:-[ef](?=[^=\s])|--editable=|--find-links=)(.+)")
_LISTED = re.compile(r"^\s*- +")
_DOTTED = re.compile(r"\.{1,2}(?:[/\[]|$)")
_ARCHIVE = re.compile(r"\.(?:whl|zip|tar|tgz|tar\.\w+)$")

# A line of `sh`, as far as it takes to tell what is called with which words.
_SHELL = re.compile(
    r"""(?:[ \t\r]|\\\n)+ | \#[^\n]*
    | (?P<end>&&|\|\||[;&|\n()])
    | (?P<into>\d*(?:>>|>&|<&|>|<(?!<))[ \t]*)
    | (?P<word>(?:[^\s;&|()<>"'\\`] | \\. | '[^']*' | "(?:[^"\\`]|\\.)*")+)""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_NO_PART = frozenset({"sudo", "exec", "time", "command", "nice", "-n", "-E", "-y", "!"})
# What these do does not depend on the tree, whatever their words are, as long as none is a path in it.
_OF_NO_TREE = frozenset(
    {"apt", "apt-get", "dnf", "yum", "apk", "conda", "mamba", "micromamba", "echo", "printf", "true", ":", "set"}
    | {"export", "unset", "mkdir", "curl", "wget", "cat", "ls", "which", "date", "nvidia-smi", "sleep", "test", "["}
)
_MODULES = frozenset({"ensurepip", "spacy", "nltk.downloader"})
_CONDAS = frozenset({"conda", "mamba", "micromamba"})
_PACKAGE_MANAGERS = _CONDAS | {"apt", "apt-get", "dnf", "yum", "apk"}
_THEIR_INSTALLS = frozenset({"install", "update", "upgrade", "add", "remove", "clean", "makecache"})
_QUIET = frozenset({"echo", "printf", "true", ":", "set", "export", "unset", "which", "date", "nvidia-smi", "sleep"})
_INTO_A_FOLDER = re.compile(r"-[tep]|--(?:target|prefix|root|src|editable)(?:=|$)")
_INTO_A_TARGET = re.compile(r"-t|--target(?:=|$)")
_INTO_A_FILE = re.compile(r"-[a-zA-Z]*[oO]|--(?:output|remote-name)")
_INTO_NOWHERE = re.compile(r"\d*>+[ \t]*/dev/null(?![\w/.-])|\d*>&[ \t]*\d")
# Of the job's variables, those that builds of packages read and that say where packages come from.
_BUILD_VARIABLES = re.compile(
    r"PIP_|UV_|CONDA_|MAMBA_|CMAKE|SKBUILD|CC$|CXX$|NVCC|\w*(?:FLAGS|BUILD|CUDA|ROCM|ARCH|FORCE|SKIP|COMPILE)"
)
_NAMED_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWanted:
    """What a job wants of its Python: `always` a layer of its own (setup, conda), or one for what the base lacks.

    `digest` is the hash of all that the layer depends on, save what is the node's own. `tree` is the tree of code that
    it is made in, where that counts: what a setup leaves there is gone with it; empty where it does not.
    """

    digest: str
    always: bool
    boto3: bool
    torch: bool
    tree: str = ""


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
    found = re.findall(r"(?<![\w./-])(?:-[rc])?([\w./][\w./-]*\.(?:txt|toml|lock|in|cfg|ya?ml))\b", setup)
    named = (name for words in _commands(setup) or () for name in _files_of(words))
    return tuple(dict.fromkeys((*found, *named)))


def nested_files(name: str, text: str) -> tuple[str, ...]:
    """Return the files of the tree that a requirements file names in its turn, by their paths in the tree."""
    found = (posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in _NESTED.findall(text))
    return tuple(dict.fromkeys(path for path in found if not path.startswith(("/", "../")) and ":" not in path))


def requirement_files(setup: str) -> tuple[str, ...]:
    """Return the files that may name packages: those in the text, and the tree's own where it is installed from."""
    return (*setup_files(setup), *(_OF_THE_TREE if setup_uses_tree(setup) else ()))


def setup_uses_tree(setup: str) -> bool:
    """Whether anything in the synced tree may count for what a setup text makes, beside the files that it names.

    It does (`pip install -e .`, `bash install.sh`, `uv sync`, `make`), unless every command is known to install by
    names and by such files: a layer made once too often costs minutes, one that is taken though the tree has changed
    trains on the old packages.
    """
    commands, files = _commands(setup), setup_files(setup)
    return commands is None or any(_may_use_tree(words, files) for words in commands)


def only_installs(setup: str) -> bool:
    """Whether a setup text is known to do nothing but install packages: any other may make files in the tree.

    It runs there: what it clones (`git clone`), downloads (`curl -O`) or writes is beside the script.
    """
    commands, files = _commands(setup), setup_files(setup)
    if commands is None or any(found["into"] for found in _SHELL.finditer(_INTO_NOWHERE.sub("", setup))):
        return False
    return all(_only_installs(words, files) for words in commands)


def setup_variables(setup: str, env: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return those of the job's variables on which it depends what a setup makes.

    All where it runs what cannot be told; else those that it names, and those that builds read (`CMAKE_ARGS`,
    `TORCH_CUDA_ARCH_LIST`, `PIP_EXTRA_INDEX_URL`). A learning rate makes no new layer.
    """
    if setup_uses_tree(setup):
        return env
    named = frozenset(_NAMED_VARIABLE.findall(setup))
    return tuple((name, value) for name, value in env if name in named or _BUILD_VARIABLES.match(name))


def _commands(setup: str) -> tuple[tuple[str, ...], ...] | None:
    """Return the words of each command of a shell text, unquoted; None where this is not enough of a shell for it."""
    calls = _calls(setup)
    return None if calls is None else tuple(words for words, _ in calls if words)


def _calls(setup: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] | None:
    """Return the words of each command and into which files its output goes; None as for `_commands`."""
    calls: list[tuple[list[str], list[str]]] = [([], [])]
    if re.search(r'"[^"]*\$\(', setup):
        return None  # a command within a word
    at, into = 0, ""
    while at < len(setup):
        found = _SHELL.match(setup, at)
        if found is None:
            return None
        at = found.end()
        if found["end"]:
            calls.append(([], []))
        elif found["word"] and into in ("", ">", ">>"):
            try:
                calls[-1][bool(into)].extend(shlex.split(found["word"]))
            except ValueError:
                return None
        into = (found["into"] or "").strip().lstrip("12")
    return tuple((tuple(_called(words)), tuple(written)) for words, written in calls)


def _called(words: list[str]) -> list[str]:
    """Return a command without what stands before its name."""
    while words and (words[0] in _NO_PART or _ASSIGNED.match(words[0])):
        words = words[1:]
    return words


def _may_use_tree(words: tuple[str, ...], files: tuple[str, ...]) -> bool:
    """Whether a command may be of the tree, beside by `files`: what these hold counts by itself."""
    asked = _asked_of_pip(words)
    if asked is not None:
        named = frozenset(_files_of(words))
        return _installs_tree(tuple(word for word in asked if word not in named))
    match words:
        case ("python" | "python3", "-m", module, *rest) if module in _MODULES:
            return any(map(_is_in_tree, rest))
        case ("git", "clone" | "lfs" | "config", *rest):
            return any(map(_is_in_tree, rest))
        case _:
            read = files if words[0] in _CONDAS else ()
            others = (word.removeprefix("--file=") for word in words[1:])
            return words[0] not in _OF_NO_TREE or any(_is_in_tree(word) for word in others if word not in read)


def _only_installs(words: tuple[str, ...], files: tuple[str, ...]) -> bool:
    if words[0] in _QUIET:
        return True
    if _may_use_tree(words, files) or any(map(_INTO_A_FOLDER.match, words)):
        return False
    return _is_a_managers(words) or _asked_of_pip(words) is not None


def _is_a_managers(words: tuple[str, ...]) -> bool:
    """Whether a package manager of the system installs by it."""
    named = (word for word in words[1:] if not word.startswith("-") and word != "env")  # `conda env update`
    return bool(words) and words[0] in _PACKAGE_MANAGERS and next(named, "") in _THEIR_INSTALLS


def _leaves_files(setup: str) -> bool:
    """Whether a setup clones, downloads, installs or writes into the tree, where it runs, by relative paths alone."""
    return any(_leaves_file(words, written) for words, written in _calls(setup) or ())


def _leaves_file(words: tuple[str, ...], written: tuple[str, ...]) -> bool:
    if _asked_of_pip(words) is not None:  # its output is a log; and `numpy>=1.26` without quotes writes one, too
        given = (after for before, after in pairwise(words) if _INTO_A_TARGET.fullmatch(before))
        within = (word.partition("=")[2] for word in words if _INTO_A_TARGET.match(word) and "=" in word)
        return any(not into.startswith("/") for into in (*given, *within))
    if not _is_a_managers(words) and any(not into.startswith(("/", "&", "~", "$HOME", "${HOME}")) for into in written):
        return True
    if not words or any(word.startswith("/") for word in words[1:]):
        return False
    if words[0] == "curl":
        return any(map(_INTO_A_FILE.match, words))
    return words[0] in ("wget", "mkdir") or words[:2] == ("git", "clone")


def _asked_of_pip(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the words behind `pip install`, in whatever spelling; None for what is none."""
    match words:
        case ("python" | "python3", "-m", "pip", *rest) | ("uv", "pip", *rest) | ("pip" | "pip3", *rest):
            left = list(rest)
        case _:
            return None
    while left and left[0].startswith("-"):
        left = left[1:]
    return tuple(left[1:]) if left and left[0] in ("install", "sync", "uninstall", "list", "freeze", "check") else None


def _files_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of the tree in which a call of pip, or of uv for it, finds more to install."""
    asked = _asked_of_pip(words)
    if asked is None:
        return ()
    found = [word for before, word in pairwise(("", *asked)) if before in _FILE_OPTIONS]
    found += [match[1] for word in asked if (match := _FILE_IN_OPTION.fullmatch(word))]
    if "sync" in words[:4]:
        found += [word for word in asked if not word.startswith("-")]
    return tuple(name for name in found if "://" not in name and "$" not in name and not name.startswith("/"))


def _installs_tree(asked: tuple[str, ...]) -> bool:
    """Whether pip is asked for a folder or an archive of the tree, or told to look for some there."""
    for before, word in pairwise(("", *asked)):
        local = _LOCAL_IN_OPTION.fullmatch(word)
        value = local[1] if local else word if before in _LOCAL_OPTIONS else ""
        if value and "://" not in value and not value.startswith("/"):
            return True
        if not word.startswith("-") and _is_in_tree(word):
            return True
    return False


def _is_in_tree(word: str) -> bool:
    """Whether a word is a path in the tree, or may be one once the shell has put a variable's value in."""
    if "file:" in word:
        return True
    if "://" in word or word.startswith(("/", "-")):
        return False
    return "/" in word or word.startswith("$") or bool(_DOTTED.match(word) or _ARCHIVE.search(word))


def _names_tree(name: str, data: bytes) -> bool:
    """Whether a file that a setup reads installs from the tree: the lines of a requirements file, or of conda's."""
    text = data.decode("utf-8", errors="replace")
    if name.endswith((".toml", ".lock", ".cfg")):
        return False  # they say how a project is made, and whoever makes that has named the tree
    lines = (re.sub(r"(?:^|\s)#.*|\s;.*", "", line) for line in text.splitlines())
    return any(_installs_tree(tuple(_LISTED.sub("", line).replace('"', "").replace("'", "").split())) for line in lines)


def depends_on_tree(setup: str, files: tuple[tuple[str, bytes], ...], conda: bytes | None = None) -> bool:
    """Whether each tree of code needs a layer of its own: it is installed from, or files are left in it."""
    read = (*files, ("conda.yml", conda or b""))
    return setup_uses_tree(setup) or _leaves_files(setup) or any(_names_tree(name, data) for name, data in read)


def setup_digest(
    setup: str,
    files: tuple[tuple[str, bytes], ...],
    code: str,
    *,
    env: tuple[tuple[str, str], ...] = (),
    requirements: tuple[str, ...] = (),
    conda: bytes | None = None,
) -> str:
    """Return the hash of all that a layer depends on, save what is the node's own; `code` counts if the tree does.

    `env` are the job's variables without its secrets; `requirements` is what the layer must have beside what the setup
    installs; `conda` an environment file's content. Mirrors do not count: the same packages come from them.
    """
    parts = [setup, code if depends_on_tree(setup, files, conda) else ""]
    parts += [f"{name}: {value}" for name, value in setup_variables(setup, env)]
    parts += [f"{name}={hashlib.sha256(data).hexdigest()}" for name, data in files]
    parts += requirements
    if conda is not None:
        parts.append(f"conda: {hashlib.sha256(conda).hexdigest()}")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def layer_key(digest: str, *, python: str, version: tuple[int, ...], platform: str, gpu: tuple[str, str]) -> str:
    """Return the layer's name: the same wishes on the same interpreter, platform and kind of GPU are the same layer.

    `gpu` is the builds of torch that suit it and its driver.
    """
    parts = [digest, python, list(version), platform, list(gpu)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


# Which build of torch a machine can run.


TORCH = "torch>=2.6,<2.14"
"""What is installed for a torchrun job that names no torch itself: the range that this package is tested with."""

# Wheels of CUDA 12.8 and 13 hold code for Turing and newer; those of 12.6 go back to Maxwell, and from torch 2.11 on
# leave Hopper out (pytorch/pytorch issues 172352 and 178665, RELEASE.md; read 2026-11). cu128 ends with torch 2.11.
_OLD_GPUS = re.compile(
    r"\b(V100S?|TITAN V|GV100|P100|P40|P4|GTX 10\d\d|TITAN Xp?|M60|M40|M4|GTX 9\d\d|Quadro [PM]\d+)\b"
)


def torch_backend(names: tuple[str, ...]) -> str:
    """Return uv's UV_TORCH_BACKEND for a machine with GPUs of these names: by `auto` it goes by the driver alone."""
    if not names:
        return "cpu"
    return "cu126" if any(_OLD_GPUS.search(name) for name in names) else "auto"


def why_no_gpu(torch: str, cuda: str | None, driver: str) -> str | None:
    """Return why this torch would not use GPUs under this driver, with both versions; None if it would."""
    if cuda is None:
        return f"torch {torch} is built for the CPU, and the node has NVIDIA GPUs (driver {driver})"
    least = least_driver(cuda)
    if least is not None and is_older(driver, least):
        return f"torch {torch} is built for CUDA {cuda}, which needs driver {least}; the node has {driver}"
    return None


def names_torch(text: str) -> bool:
    """Whether a setup text, a requirements file or a conda file installs torch by its name."""
    return re.search(r"(?<![\w.-])(?:py)?torch(?:-\d|(?![\w./-]|\s*:))", _without_comments(text)) is not None


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


# The tools that make a layer, which a node may fetch for itself: one version each, one hash for each file.


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFile:
    """A file that must have this SHA-256, wherever it comes from."""

    name: str
    sha256: str
    url: str = ""
    """Where it lies if nobody names another place; empty: whoever fetches it knows."""


UV_VERSION = "0.13.9"
PIP_VERSION = "26.3"
MICROMAMBA_VERSION = "2.9.0-0"

_PYPI_FILES = "https://files.pythonhosted.org/packages"
_MICROMAMBA = f"https://github.com/mamba-org/micromamba-releases/releases/download/{MICROMAMBA_VERSION}"
_UV = (
    f"uv-{UV_VERSION}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    f"uv-{UV_VERSION}-py3-none-manylinux_2_28_aarch64.whl",
)

# By platform.machine(), for Linux. Hashes and addresses of wheels: PyPI, 2026-11.
UV_WHEELS = {
    "x86_64": PinnedFile(
        name=_UV[0],
        sha256="d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
        url=f"{_PYPI_FILES}/3d/aa/26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/{_UV[0]}",
    ),
    "aarch64": PinnedFile(
        name=_UV[1],
        sha256="ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375",
        url=f"{_PYPI_FILES}/fe/2f/51a5de367c602592c018a42a23d57fba5f2689fe6c3bf025dcf043b39c61/{_UV[1]}",
    ),
}
PIP_WHEEL = PinnedFile(
    name=f"pip-{PIP_VERSION}-py3-none-any.whl",
    sha256="f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13",
)
# As other public projects pin the same release's files (2026-11): a wrong hash is a refusal, never a wrong program.
MICROMAMBA = {
    "x86_64": PinnedFile(
        name="micromamba-linux-64",
        sha256="366cd9cd8be14df1ab8ed50352a82111082a36686b2d389fdb79a92c3fafb3e3",
        url=f"{_MICROMAMBA}/micromamba-linux-64",
    ),
    "aarch64": PinnedFile(
        name="micromamba-linux-aarch64",
        sha256="9f93b974adcb4d166996af969b6cd371287d1a3e52733704727884d9b74cb7a7",
        url=f"{_MICROMAMBA}/micromamba-linux-aarch64",
    ),
}
