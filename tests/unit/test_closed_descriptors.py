"""A command line that was started with closed descriptors, as some schedulers do."""

from __future__ import annotations

import subprocess
import sys

OPENS_A_FILE = (
    "import os, sys\n"
    "import gpucloud.cli.app\n"
    "def command(**_):\n"
    "    opened = os.open('/', os.O_RDONLY)\n"
    "    os.write(2, f'{opened > 2} {sys.stdin.read()!r} {sys.stdin.isatty()}'.encode())\n"
    "gpucloud.cli.app.app = command\n"
    "from gpucloud.__main__ import main\n"
    "main()\n"
)


def test_a_closed_stdin_is_empty_and_its_number_is_nobody_elses():
    argv = ("sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", OPENS_A_FILE)
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "True '' False")
