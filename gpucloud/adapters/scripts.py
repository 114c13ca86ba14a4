"""What can be seen of a user's scripts without running them: which one a line starts, and how it saves."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.checkpoint.protection import Code, Protection, protection_of
from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.member import needs_shell

_IMPORTS = re.compile(
    rb"^[ \t]*(?:import\s+gpucloud\.(?:resume|frameworks)|from\s+gpucloud(?:\.resume|\.frameworks[\w.]*)?\s+import)\b",
    re.MULTILINE,
)
_LARGEST = 2**20
_MOST = 2000
"""Files that are read of the code of one job."""


def imports_resume(code: Path) -> bool:
    """Whether a Python file in the job's code imports `gpucloud.resume`."""
    return next(_importing(code), None) is not None


def how_it_saves(job: Job) -> Protection:
    """Return how the job's script saves, as far as its code and its job file tell; the code is read anew."""
    return protection_of(job, look(job.code, job.run))


def look(code: Path, run: str) -> Code:
    """Return what the job's code tells of how it saves: of the script of `run`, and of what it imports."""
    script = _script_of(code, run)
    if script is not None and _reaches(code, script):
        return Code(script=str(script.relative_to(code)), reached=True)
    other = next(_importing(code), None)
    return Code(
        script=str(script.relative_to(code)) if script is not None else None,
        elsewhere=str(other.relative_to(code)) if other is not None else None,
    )


def _script_of(code: Path, run: str) -> Path | None:
    """Return the first Python file of the code that a `run:` line names, by its path or with `-m`."""
    try:
        words = shlex.split(run)
    except ValueError:
        return None
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            found = _module(word, (code, code / "src"))
            found = found.with_name("__main__.py") if found is not None and found.name == "__init__.py" else found
        else:
            found = code / word if word.endswith(".py") and not Path(word).is_absolute() else None
        if found is not None and ".." not in found.parts and found.is_file():
            return found
    return None


def _reaches(code: Path, script: Path) -> bool:
    """Whether the script imports `gpucloud.resume`, itself or by other files of the code."""
    waiting, known = [script], {script}
    while waiting and len(known) <= _MOST:
        path = waiting.pop()
        text = _read(path)
        if _IMPORTS.search(text) is not None:
            return True
        new = {found for found in _imported(text, path, code, script.parent) if found not in known}
        known |= new
        waiting += sorted(new)
    return False


def _imported(text: bytes, path: Path, code: Path, beside: Path) -> Iterator[Path]:
    """Yield the files of the code that one of them imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        roots: tuple[Path, ...] = (beside, code, code / "src")
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                roots = (path.parents[min(node.level, len(path.parents)) - 1],)
            base = f"{node.module}." if node.module else ""
            names = [*([node.module] if node.module else []), *(f"{base}{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):  # a package's own code runs too
                found = _module(".".join(parts[:length]), roots)
                if found is not None:
                    yield found


def _module(name: str, roots: tuple[Path, ...]) -> Path | None:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    places = (place for root in roots for place in (root.joinpath(*parts, "__init__.py"), root.joinpath(*parts)))
    files = (place if place.suffix else place.with_suffix(".py") for place in places)
    return next((file for file in files if file.is_file()), None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size <= _LARGEST else b""
    except OSError:
        return b""


def _importing(code: Path) -> Iterator[Path]:
    return (path for path in _scripts(code) if _IMPORTS.search(_read(path)) is not None)


def _scripts(code: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(code):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= _LARGEST:
                yield path


# Which file of the code a command line starts, where that can be told for sure.


_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SHELLS = ("bash", "sh", "dash", "zsh")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_BEFORE = ("env", "nohup", "time", "nice", "exec", "numactl", "mpirun", "mpiexec", "uv", "poetry")
_ELSEWHERE = ("-wd", "--wd", "-C", "--chdir", "--directory", "--project")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A file that a line starts, relative to the code folder; `module` as `-m` names it, `itself` as the program.

    Without `sure` it may be found elsewhere, on the machine's own path.
    """

    path: str
    module: str | None = None
    itself: bool = False
    sure: bool = True


def started_by(run: str) -> Started | None:
    """Return the file of the code that a command line starts; None where that cannot be told without running it.

    What needs a shell, lies elsewhere on the machine, or is put together there, is none.
    """
    if needs_shell(run):
        return None
    try:
        words = shlex.split(run)
    except ValueError:
        return None
    if not words or any(word.startswith(_ELSEWHERE) for word in words):
        return None
    program = words[0]
    if program in _BEFORE:
        at = next((at for at, word in enumerate(words) if _starts_scripts(word)), None)
        return _argument(words[at], words[at + 1 :]) if at is not None else None
    if _starts_scripts(program):
        return _argument(program, words[1:])
    if "/" in program or program.endswith(".sh"):
        return _inside(Started(path=program, itself=True, sure="/" in program))
    return None


def _starts_scripts(word: str) -> bool:
    name = word.rpartition("/")[2]
    return _PYTHON.fullmatch(name) is not None or name in (*_SHELLS, *_LAUNCHERS)


def _argument(program: str, words: Sequence[str]) -> Started | None:
    name = program.rpartition("/")[2]
    if name in _LAUNCHERS:
        return _launched(words)
    return _of_a_shell(words) if name in _SHELLS else _of_python(words)


def _of_a_shell(words: Sequence[str]) -> Started | None:
    waiting = iter(words)
    for word in waiting:
        if word in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file"):
            next(waiting, None)
        elif re.match(r"-\w*[cs]", word):  # commands on the line, or from its input
            return None
        elif not word.startswith(("-", "+")):
            # A bare name is looked for on the path, too.
            return _inside(Started(path=word)) if "/" in word or word.endswith((".sh", ".bash")) else None
    return None


def _of_python(words: Sequence[str]) -> Started | None:
    waiting = iter(words)
    for word in waiting:
        if word in ("-m", "-c", "-"):
            return _module_started(next(waiting, "")) if word == "-m" else None
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(waiting, None)
        elif not word.startswith("-"):
            return _inside(Started(path=word)) if "/" in word or word.endswith(".py") else None
    return None


def _launched(words: Sequence[str]) -> Started | None:
    """Of launchers with options of their own the first Python file is the script; with `-m` it is a module."""
    if any(word.replace("_", "-") == "--no-python" for word in words):
        return None
    for before, word in zip(["", *words], words, strict=False):
        if before in ("-m", "--module"):
            return _module_started(word)
        if word.endswith(".py") and not word.startswith("-"):
            return _inside(Started(path=word))
    return None


def _module_started(name: str) -> Started | None:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    return Started(path="/".join(parts) + ".py", module=name)


def _inside(found: Started) -> Started | None:
    parts = found.path.split("/")
    return None if found.path.startswith(("/", "~", "-")) or ".." in parts else found


def is_there(code: Path, started: Started) -> bool:
    """Return whether the folder has what is started; of a module, unless it is surely none of the folder's packages."""
    if started.module is None:
        return os.path.exists(code / started.path)  # noqa: PTH110  never raises
    package = code / started.module.partition(".")[0]
    own = "." in started.module and os.path.isfile(package / "__init__.py")  # noqa: PTH113  never raises
    if not own:
        return True  # it may be installed
    place = code / started.path.removesuffix(".py")
    return place.is_dir() or next(place.parent.glob(f"{place.name}.*"), None) is not None
