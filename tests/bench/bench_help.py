"""Measures what `gpucloud --help` costs beside a bare typer app, in turns: `python -m tests.bench.bench_help`."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import figure

ROUNDS = 15
RATIO_LIMIT = 1.3
BARE = """
import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def hello(name: str = "you") -> None:
    typer.echo(name)


@app.command()
def bye(name: str = "you") -> None:
    typer.echo(name)


app()
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        bare = Path(name) / "bare.py"
        bare.write_text(BARE)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            theirs.append(cpu_seconds([sys.executable, str(bare), "--help"]))
            ours.append(cpu_seconds([sys.executable, "-m", "gpucloud", "--help"]))
    figure("help_cpu_s", min(ours))
    figure("bare_typer_help_cpu_s", min(theirs))
    return 0 if figure("help_to_bare_typer_cpu_ratio", min(ours) / min(theirs), RATIO_LIMIT) else 1


def cpu_seconds(argv: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
