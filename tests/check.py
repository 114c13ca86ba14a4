"""Runs every check: `python -m tests.check [--quick | --engines] [--changed [BASE]] [pytest arguments]`.

One line per stage with its seconds, the output of a stage that fails, then pytest's output and the short proofs, with
what they computed. The exit code is the worst of all stages.

`--quick` runs format, lint, types, import contracts, the handbook's site, unit and contract tests alone. `--changed`
runs all that looks at the code, and the tests which a change against BASE (`main`) can reach, uncommitted and new files
included; it says what it leaves out. With both, the unit and contract tests among them. `--engines` runs the tests that
need what pip does not bring (tests/engines.py), and says what is missing.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tests.choosing import Choice, choose, uses_of_all
from tests.engines import ENGINES, files_with
from tests.prove.__main__ import GOALS

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "ruff format": ["ruff", "format", "--check", "."],
    "ruff check": ["ruff", "check", "."],
    "mypy": ["mypy"],
    "lint-imports": ["lint-imports"],
    "bandit": ["bandit", "--quiet", "--configfile", "pyproject.toml", "-ll", "--recursive", "gpucloud", "templates"],
    "shellcheck": ["shellcheck", ".ci/run"],
    "terraform fmt": ["terraform", "fmt", "-check", "-recursive", "terraform"],
    "site": ["mkdocs", "build", "--strict", "--config-file", "gpucloud/mkdocs.yml"],
}
QUICK_STAGES = ("ruff format", "ruff check", "mypy", "lint-imports", "site")
# Most tests wait (for processes, for Terraform, for machines) and run side by side, a file after the other in the order
# of their names: contracts and the emulated AWS, where a file takes minutes, come first, and unit tests last; so no
# worker ends long after the others. Those marked `alone` look at how quick things are; they compute little.
_BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]
TESTS = {
    "tests": ["-m", "not alone and not slow and not cloud", "-n", "5", *_BY_FILE],
    "tests alone": ["-m", "alone and not slow and not cloud", "--marked=alone", "-n", "2", *_BY_FILE],
}
QUICK_FOLDERS = ("tests/unit", "tests/contract")
# These compute more than they wait.
QUICK_TESTS = {"quick tests": ["-m", "not alone and not slow and not cloud and not emulated", "-n", "2", "-q"]}
MISSING = 127  # what a shell answers for a program that is not there
NONE_CHOSEN = 5  # what pytest answers when no test was
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30


def main(arguments: list[str]) -> int:
    """Return 0 when every stage passed, else the highest exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is prepared goes before it does
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts beside itself ignore it
    with quick_files():
        return check(arguments)


@contextmanager
def quick_files() -> Iterator[None]:
    """Give what is started a folder in memory for its files, and let it keep the bytecode of what it imports.

    The tests write and delete tens of thousands of small files: on a disk that takes as long as a tenth of the tests.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not in_memory(MEMORY):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="g-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        yield


def in_memory(folder: Path) -> bool:
    """Whether files there cost no disk, programs may be run from there, and there is room."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return False
    roomy = there.f_bavail * there.f_frsize >= ENOUGH_BYTES
    return roomy and not there.f_flag & os.ST_NOEXEC and os.access(folder, os.W_OK)


def check(arguments: list[str]) -> int:
    asked, rest = _parser().parse_known_args(arguments)
    if asked.engines:
        return engines(rest)
    if asked.changed:
        return check_changed(asked.changed, rest, quick=asked.quick)
    if asked.quick:
        return max(stages(QUICK_STAGES), all_tests(QUICK_TESTS, [*QUICK_FOLDERS, *rest]))
    return max(stages(STAGES), all_tests(TESTS, rest), proofs())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.check", allow_abbrev=False, epilog="Other arguments go to pytest."
    )
    parser.add_argument(
        "--quick", action="store_true", help="format, lint, types, contracts, site, unit and contract tests"
    )
    parser.add_argument(
        "--engines", action="store_true", help="tests that need what pip does not bring, such as Open MPI"
    )
    parser.add_argument(
        "--changed", nargs="?", const="main", metavar="BASE", help="only tests that a change against BASE can reach"
    )
    return parser


def check_changed(base: str, arguments: list[str], *, quick: bool) -> int:
    """Look at all code, and run the tests that the change reaches; say what is left out."""
    changed = changed_files(base)
    files = _git("ls-files", "--cached", "--others", "--exclude-standard")
    present = [path for path in files if (ROOT / path).is_file()]
    texts = {path: (ROOT / path).read_text() for path in present if path.endswith(".py")}
    choice = choose(uses_of_all(texts, present), changed)
    chosen = [path for path in choice.tests if not quick or path.startswith(QUICK_FOLDERS)]
    known = len(choice.tests) + len(choice.unreached)
    print(f"{len(changed)} files differ from {base}; they reach {len(choice.tests)} of {known} test files", flush=True)
    code = stages(QUICK_STAGES if quick else STAGES)
    if chosen:
        code = max(code, all_tests(QUICK_TESTS if quick else TESTS, [*chosen, *arguments]))
    for line in left_out(choice, chosen):
        print(f"left out: {line}", flush=True)
    return code


def changed_files(base: str) -> list[str]:
    """Return what differs from where the branch left `base`, in the working tree too; gone files among them."""
    known = [name for name in (base, f"origin/{base}") if _has(name)]
    if not known:
        sys.exit(f"there is no commit {base} here; --changed=BASE names another")
    (fork,) = _git("merge-base", known[0], "HEAD")
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*_git("diff", "--name-only", "--no-renames", fork), *new})


def _has(commit: str) -> bool:
    argv = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    return subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", "-c", "core.quotePath=false", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.splitlines()


def left_out(choice: Choice, chosen: Collection[str]) -> Iterator[str]:
    """Say what was not run, what is reached first, with the command that runs it."""
    reached = Counter(str(PurePosixPath(path).parent) for path in choice.tests if path not in chosen)
    if reached:
        counted = ", ".join(f"{count} files in {folder}" for folder, count in sorted(reached.items()))
        yield f"tests that the change reaches, {counted}: python -m tests.check --changed"
    goals = [goal for path in choice.proofs if (goal := PurePosixPath(path).stem.replace("_", "-")) in GOALS]
    if goals:
        yield f"proofs that the change reaches: python -m tests.prove --short {' '.join(goals)}"
    if choice.unreached:
        yield f"{len(choice.unreached)} test files that it does not reach: python -m tests.check"


def stages(names: Iterable[str]) -> int:
    with ThreadPoolExecutor(max_workers=2) as pool:
        return max(pool.map(lambda name: stage(name, STAGES[name]), names))


def all_tests(groups: Mapping[str, list[str]], arguments: list[str]) -> int:
    return max(tests(name, [*chosen, *arguments]) for name, chosen in groups.items())


def tests(name: str, arguments: list[str]) -> int:
    used = Used()
    code = subprocess.run([sys.executable, "-m", "pytest", *below(os.environ), *arguments], cwd=ROOT).returncode
    tell(name, code, used)
    return 0 if code == NONE_CHOSEN else code


def below(environ: Mapping[str, str]) -> list[str]:
    """Return where pytest makes its folders: few characters, since a socket's path has 107 at most (unix(7))."""
    folder = Path(environ.get("TMPDIR", "/tmp"))
    return [f"--basetemp={folder / 't'}"] if folder.parent == MEMORY else []


def engines(arguments: list[str]) -> int:
    """Run each engine's tests, and end with a table: what became of them, or what is missing."""
    rows = [(name, *engine_tests(name, arguments)) for name in ENGINES]
    width = max(len(name) for name in ENGINES)
    print()
    for name, _, told in rows:
        print(f"{name:<{width}}  {told}", flush=True)
    return max(code for _, code, _ in rows)


def engine_tests(name: str, arguments: list[str]) -> tuple[int, str]:
    """Run the tests that need the engine; return the exit code and pytest's last line, or what installs the engine."""
    missing = ENGINES[name].missing()
    if missing:
        return MISSING, f"missing: {missing}"
    print(f"{name}: {ENGINES[name].shows}", flush=True)
    chosen = ["-q", "-m", f"engine(name={name!r})", *files_with(name)]
    argv = [sys.executable, "-m", "pytest", *below(os.environ), *chosen, *arguments]
    last = ""
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return running.returncode, last.strip("= ")


def proofs() -> int:
    """Every promise in its short form: counts, no times."""
    used = Used()
    code = subprocess.run([sys.executable, "-m", "tests.prove", "--short"], cwd=ROOT).returncode
    tell("proofs", code, used)
    return code


def stage(name: str, argv: list[str]) -> int:
    cold = name == "mypy" and not (ROOT / ".mypy_cache").is_dir()
    started = time.monotonic()
    try:
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        code, output = done.returncode, done.stdout
    except FileNotFoundError:
        code, output = MISSING, f"{argv[0]} is not installed\n"
    said = output if code else ""
    tell(f"{name}, cold" if cold else name, code, f"{time.monotonic() - started:6.1f} s", said)
    return abs(code)


class Used:
    """What has gone by since it was made: time, and time in which what was started computed."""

    def __init__(self) -> None:
        self._at, self._computed = time.monotonic(), self._computing()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._at:6.1f} s {self._computing() - self._computed:7.1f} CPU-s"

    @staticmethod
    def _computing() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime


def tell(name: str, code: int, used: object, said: str = "") -> None:
    print(f"{name:<14} {'ok' if code == 0 else f'FAILED ({code})':<14} {used}\n{said}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
