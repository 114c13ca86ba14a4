"""Every kind of broken job file ends in exit code 2 with a line and a column: never in a traceback, never slowly."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.__main__ import main
from tests.prove.goal import Figure, Form, Goal

ROOT = Path(__file__).resolve().parents[2]
CPU_S = 3.0
MEMORY_MIB = 64

_PLACE = re.compile(r"job\.yaml:\d+:\d+: ")
_SHORT, _LONG, _REAL = 150, 1000, 5

_SCALARS = (
    "", "~", "null", "true", "no", "0", "-1", "1e999", "-0", ".inf", ".nan", "1_000", "0x10", "0o17", "12:30:45",
    "2026-01-01", "9" * 400, "0." + "9" * 400, "1e-400", "99999999999999999999 USD", "-5 USD", "5 EUR", "nan USD",
    "1 USD 2", "10 parsecs", "-3 h", "999999999999999 h", "0 s", "10 stepz", "¾ h", "\uff11\uff12", "\u0663", "\u202e1",
    "\U0001f4b8" * 50, "[]", "{}", "[[[]]]", "{a: {b: c}}", "[1, 2, 3]", "!!python/name:os.system", "!!binary AAAA",
    "!!int 3", "!<tag:x> 3", "&a 1", "*a", "|\n    many\n    lines", ">-\n    folded", '"\\x00"', '"\\u2028"',
    '"\\ud800"', '"\\uFFFF"', "'it''s", '"open', "'", '"', "`x`", "@x", "%x", "? x", ": x", "- x", "a: b", "#", "\tx",
    "x" * 5000, "../../..", "/", "~root", "$(id)", "${HOME}", "s3://", "s3://UPPER/x", "s3:///x", "file://x", "http://",
    "NaN", "on", "1.", ".5", "+1", "1 000", "1,5 USD", "--help", "-x", "a\u0000b", "a\x1b[31mb", "a\x7f", "\x85",
)  # fmt: skip

Change = Callable[[str, random.Random], str]


def value_replaced(text: str, chance: random.Random) -> str:
    at, lines = _some_line(text, chance, r"^\s*[\w-]+:")
    lines[at] = lines[at].partition(":")[0] + ": " + chance.choice(_SCALARS)
    return "\n".join(lines) + "\n"


def key_replaced(text: str, chance: random.Random) -> str:
    at, lines = _some_line(text, chance, r"^\s*[\w-]+:")
    before, _, after = lines[at].partition(":")
    indent = before[: len(before) - len(before.lstrip())]
    lines[at] = indent + chance.choice([before.strip() + "s", before.strip().upper(), *_SCALARS]) + ":" + after
    return "\n".join(lines) + "\n"


def key_twice(text: str, chance: random.Random) -> str:
    at, lines = _some_line(text, chance, r"^\w+:")
    return "\n".join([*lines, lines[at]]) + "\n"


def key_gone(text: str, chance: random.Random) -> str:
    at, lines = _some_line(text, chance, r"^(name|run|budget):")
    return "\n".join(lines[:at] + lines[at + 1 :]) + "\n"


def characters_changed(text: str, chance: random.Random) -> str:
    letters = list(text)
    for _ in range(chance.randint(1, 6)):
        letters[chance.randrange(len(letters))] = chance.choice("\0\t\r\n:{}[]&*!|>'\"%@`#,-? \ufeff\u2028\U0001f600é")
    return "".join(letters)


def cut_off(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text))]


def lines_shuffled(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    chance.shuffle(lines)
    return "\n".join(" " * chance.choice([0, 0, 1, 2, 7]) + line for line in lines)


def nested(text: str, chance: random.Random) -> str:
    depth, (opening, closing) = chance.choice([13, 100, 5000, 30_000]), chance.choice(["[]", "{}"])
    inside = opening * depth if opening == "[" else "{a: " * depth
    return text + "tags: " + inside + closing * chance.choice([0, depth])


def bomb(text: str, chance: random.Random) -> str:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, chance.choice([5, 50])))
    return text + "l0: &l0 [lol, lol]\n" + levels + "tags: *l4\n"


def merged(text: str, chance: random.Random) -> str:
    return text + chance.choice(
        ["<<: {cloud: local}\n", "? {a: 1}\n: 2\n", "? [x]\n: y\n", "<<: *x\n", "? |\n  x\n: 1\n"]
    )


def huge(text: str, chance: random.Random) -> str:
    return text + chance.choice([
        "# " + "x" * 70_000, "env: {" + ", ".join(f"A{n}: {n}" for n in range(9000)) + "}", "x" * 65_000 + ": 1",
        "outputs: [" + "a," * 31_000 + "]", "zzz:\n" + " - a\n" * 15_000, '"' * 60_000, "- " * 30_000,
    ])  # fmt: skip


def another_document(text: str, chance: random.Random) -> str:
    return chance.choice([text + "---\n" + text, "--- 1\n...\n" + text, "%YAML 7.1\n---\n" + text, "%TAG ! x\n" + text])


CHANGES: tuple[Change, ...] = (
    value_replaced, value_replaced, value_replaced, value_replaced, key_replaced, key_replaced, key_twice, key_gone,
    characters_changed, characters_changed, cut_off, lines_shuffled, nested, bomb, merged, huge, another_document,
)  # fmt: skip


def encoded(text: str, chance: random.Random) -> bytes:
    """Return the file's bytes: mostly UTF-8, at times another encoding or rubbish."""
    data = text.encode("utf-8", "surrogatepass")
    kind = chance.randrange(12)
    if kind == 0:
        return text.encode(chance.choice(["utf-16", "utf-32", "utf-16-be"]), "replace")
    if kind == 1:
        return text.encode("latin-1", "replace") + b"\xe9\xff"
    if kind == 2:
        return data.replace(b"\n", chance.choice([b"\r\n", b"\r", b"\n\r"]))
    if kind == 3:
        at = chance.randrange(len(data) + 1)
        return data[:at] + bytes(chance.randrange(256) for _ in range(chance.randint(1, 40))) + data[at:]
    return data


def run(form: Form) -> Iterator[Figure]:
    """Yield how many files were not refused as they should; how many were; the time and memory of the worst."""
    cases = _SHORT if form is Form.SHORT else _LONG
    wrong = refused = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        bases = _bases(Path(folder))
        _here(Path(folder) / "gpucloud.yaml")  # what is imported once is no growth
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(cases):
            file = _write(Path(folder), bases, seed)
            began = time.process_time()
            code, said = _here(file)
            slowest = max(slowest, time.process_time() - began)
            fault = _fault(code, said)
            refused += code == 2
            if seed < _REAL and fault is None and (really := _really(file)) != (code, said):
                fault = f"another answer from a process of its own: {really}"
            if fault is not None:
                wrong += 1
                sys.stderr.write(f"bad-jobs: seed {seed}: {fault}\n")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    yield Figure(name="bad-jobs", value=wrong, limit=0)
    yield Figure(name="bad-jobs.refused", value=refused, limit=0.8 * cases, least=True)
    yield Figure(name="bad-jobs.memory_mib", value=grown, limit=MEMORY_MIB)
    if form is Form.LONG:
        yield Figure(name="bad-jobs.worst_cpu_s", value=slowest, limit=CPU_S)


def _bases(folder: Path) -> list[str]:
    """Return whole job files, and make what they name beside where they will lie."""
    (folder / "train.py").write_text("print()\n")
    shutil.copytree(ROOT / "templates", folder / "templates")
    os.environ |= {"GPUCLOUD_HOME": str(folder / "home"), "COLUMNS": "200"}
    texts = [path.read_text() for path in sorted((ROOT / "templates" / "jobs").glob("*.yaml"))]
    sample = subprocess.run(
        [sys.executable, "-m", "gpucloud", "init", "sample"], cwd=folder, env=_env(), capture_output=True
    )
    assert sample.returncode == 0, sample.stderr
    return [*texts, (folder / "gpucloud.yaml").read_text()]


def _write(folder: Path, bases: list[str], seed: int) -> Path:
    chance = random.Random(seed)
    text = chance.choice(bases)
    for _ in range(chance.choice([1, 1, 2])):
        text = chance.choice(CHANGES)(text, chance)
    # Whatever is still whole names a cloud that asks nobody.
    file = folder / "job.yaml"
    file.write_bytes(encoded(re.sub(r"cloud: *(aws|ssh)", "cloud: local", text), chance))
    return file


def _here(file: Path) -> tuple[int, str]:
    """Return exit code and story of `gpucloud plan FILE`, in this process through the door that a user takes."""
    out, said = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["gpucloud", "plan", str(file)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            main()
    except SystemExit as leaving:
        return int(leaving.code or 0) if not isinstance(leaving.code, str) else 1, said.getvalue()
    finally:
        sys.argv = before
    return 0, said.getvalue()


def _really(file: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "gpucloud", "plan", str(file)], env=_env(), capture_output=True)
    return done.returncode, done.stderr.decode()


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _fault(code: int, said: str) -> str | None:
    if "Traceback" in said or "fault of gpucloud itself" in said:
        return f"a fault of ours: {said[-400:]}"
    if any(ord(letter) < 32 and letter != "\n" for letter in said):
        return f"control characters reach the terminal: {said[-400:]!r}"
    if len(said) > 6_000:
        return f"{len(said)} characters of story"
    if code == 0:
        return None  # the change left the file whole
    if code != 2:
        return f"exit code {code}: {said[-400:]}"
    return None if _PLACE.search(said) else f"no line and column: {said[-400:]}"


def _some_line(text: str, chance: random.Random, like: str) -> tuple[int, list[str]]:
    lines = text.splitlines()
    found = [at for at, line in enumerate(lines) if re.match(like, line)]
    return (chance.choice(found) if found else 0), lines or [""]


GOAL = Goal(
    promise="a broken job file ends in exit code 2 with file:line:column, at once, without a traceback",
    real="`gpucloud plan` on job templates and the sample with seeded changes; some in processes of their own",
    simulated="nothing",
    run=run,
)
