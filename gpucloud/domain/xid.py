"""Errors that NVIDIA's driver writes to the kernel log (Xid): which of them condemn a GPU.

Source: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors, catalog and "working with Xid errors"), read in 2026.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Left out on purpose: 13, 31, 43, 45 are the program's own fault or follow from it, 63 is a repair that succeeded.
FATAL = {
    48: "double-bit ECC error",
    62: "its microcontroller halted",
    64: "a memory repair could not be recorded",
    74: "NVLink error",
    79: "it has fallen off the bus",
    92: "a high rate of corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its system processor (GSP) does not answer",
    120: "its system processor (GSP) failed",
    140: "unrecovered ECC error",
}
"""Numbers after which results of the GPU, or the GPU itself, cannot be relied on, with what they mean."""

_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error: its number, and the PCI address of the device as numbers (domain, bus, device)."""

    number: int
    pci: tuple[int, ...]


def find_xid(line: str) -> Xid | None:
    """Return the error that a line of the kernel log tells of, None for any other line."""
    found = _LINE.search(line)
    return Xid(number=int(found[2]), pci=pci_address(found[1])) if found else None


def pci_address(text: str) -> tuple[int, ...]:
    """Return `00000000:04:00.0` or `0000:04:00` as (0, 4, 0): the function number is left out. () for other text."""
    try:
        return tuple(int(part, 16) for part in text.partition(".")[0].split(":"))
    except ValueError:
        return ()
