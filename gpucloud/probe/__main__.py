"""One worker of a probe: its order is JSON on standard input, what it finds comes line by line on standard output."""

from __future__ import annotations

import os
import sys

from gpucloud.domain.codec import from_json
from gpucloud.domain.node.gate.report import GANG, ProbeOrder, Said, TorchFacts
from gpucloud.probe import tell

try:
    from gpucloud.probe import device
except (ImportError, OSError) as error:  # OSError: a shared library of the wheel is missing
    tell(Said(torch=TorchFacts(error=f"{type(error).__name__}: {error}")))
    sys.exit(0)


def main() -> None:
    """Do what the order says and leave at once: a communicator that lost a peer never ends by itself."""
    order = from_json(ProbeOrder, sys.stdin.read())
    (device.run_gang if order.kind == GANG else device.run)(order)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
