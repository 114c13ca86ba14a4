"""The job files that `gpucloud init` writes: a short one, and with `--full` the sample that documents every key."""

from __future__ import annotations

import json
import re

from gpucloud.adapters import bundled
from gpucloud.adapters.jobfile.values import line as read_line
from gpucloud.adapters.jobfile.values import name as read_name
from gpucloud.domain.errors import UsageError

_PLAIN = re.compile(r"[\w./-]+( [\w./=-]+)*")
_RUN = re.compile(r"(?m)^run: train\.py *(#.*)?$")
_SHORT = """\
# A gpucloud job: `gpucloud plan` says what it takes, `gpucloud train` runs it. Every key: gpucloud init --full
name: job
run: train.py               # a script and its arguments go to torchrun; another command line runs as given
cloud: local                # a rehearsal on this machine, without an account; then aws, or ssh (your own machines)
resources:
  nodes: 1                  # machines
  gpus: 1                   # GPUs in each
  #gpu: [A100, H100]        # models that will do
budget: 2 USD               # the most that it may cost, over all attempts: never exceeded
#deadline: 12h              # spot while it can wait, on demand when it cannot
#setup: pip install -r requirements.txt
#outputs: [results/]        # brought home to outputs/<job>/
"""


def sample_job(name: str, run: str = "train.py", *, full: bool = False) -> str:
    """Return the text of a job file for a job called `name`, with every key where `full`.

    UsageError when that is not a name, or `run` not one line.
    """
    text = bundled.bundled("templates", "gpucloud.yaml").read_text(encoding="utf-8") if full else _SHORT
    try:
        written = json.dumps(read_line(run), ensure_ascii=False) if not _PLAIN.fullmatch(run) else run
    except ValueError as error:
        raise UsageError(f"--run {error}", hint="gpucloud init --run train.py") from error
    return named(_RUN.sub(lambda found: f"{f'run: {written}':<27} {found[1] or ''}".rstrip(), text, count=1), name)


def named(text: str, name: str) -> str:
    """Return a job file's text with that name in it; UsageError when it is not a name."""
    try:
        read_name(name)
    except ValueError as error:
        hint = getattr(error, "hint", None)
        raise UsageError(str(error), hint=hint or "gpucloud init NAME") from error
    return re.sub(r"(?m)^name: .*$", f"name: {name}", text, count=1)
