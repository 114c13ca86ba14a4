"""`gpucloud` and `python -m gpucloud`: the one boundary where errors become exit codes."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and leave with its exit code; no error shows a traceback."""
    from gpucloud.cli.app import app  # noqa: PLC0415  (a zip on a node runs this file for the agent, without typer)

    try:
        app()
    except BrokenPipeError:
        # The reader went away: `gpucloud logs | head`. Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001  (the one place that catches everything)
        from gpucloud.cli.faults import exit_code_of  # noqa: PLC0415

        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
