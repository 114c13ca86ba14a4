"""`gpucloud` and `python -m gpucloud`: the one boundary where errors become exit codes."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and leave with its exit code; no error shows a traceback."""
    os.umask(0o077)  # keys, orders and results are their owner's, whatever the shell's umask is
    _open_what_is_closed()
    if "_GPUCLOUD_COMPLETE" in os.environ:
        from gpucloud.cli.help import answer_a_shell  # noqa: PLC0415

        answer_a_shell()
    try:
        from gpucloud.cli.app import app  # noqa: PLC0415  (a zip on a node runs this file for the agent, without typer)

        sys.exit(app(prog_name="gpucloud", standalone_mode=False))  # its errors are told below, as all are
    except BrokenPipeError:
        from gpucloud.cli.render.words import let_go_of_stdout  # noqa: PLC0415

        let_go_of_stdout()  # the reader went away: `gpucloud logs | head`
        sys.exit(141)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the one place that catches everything)
        from gpucloud.cli.faults import exit_code_of  # noqa: PLC0415

        sys.exit(exit_code_of(error))


def _open_what_is_closed() -> None:
    """Have descriptors 0 to 2 be somebody's: else the next socket gets a closed one's number, and is read as stdin."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
