"""The fleet's daemon with nodes that can be cut off, and with namespaces of their own where that is asked for.

python -m tests.emulation.daemon [--own-spaces [--home-mib MIB]] --root ROOT --lock FD
"""

from __future__ import annotations

import argparse
import sys

from gpucloud.adapters.local.daemon import keep
from tests.emulation.grounds import Cuttable, OwnSpaces

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--own-spaces", action="store_true")
    parser.add_argument("--home-mib", type=int, default=0)
    options, rest = parser.parse_known_args(sys.argv[1:])
    keep(rest, OwnSpaces(options.home_mib) if options.own_spaces else Cuttable())
