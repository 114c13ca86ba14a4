"""How devices are joined, as nvidia-smi writes it."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpucloud.domain.gate.report import Links

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")
_PORTS = re.compile(r"GPU (\d+):")


def links(say: Callable[..., str]) -> Links:
    """Return the links; `say` runs nvidia-smi with these words."""
    return Links(pairs=pairs(say("topo", "-m")), ports=ports(say("nvlink", "-s")))


def pairs(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return what `nvidia-smi topo -m` writes for every two devices, the lower index first."""
    lines = _COLOUR.sub("", text).splitlines()
    columns: list[int] = []
    found = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if not columns and "GPU0" in cells[1:]:
            columns = [int(m[1]) for cell in cells[1:] if (m := _GPU.fullmatch(cell))]
        elif columns and (row := _GPU.fullmatch(cells[0])):
            one = int(row[1])
            found += [(one, other, kind) for other, kind in zip(columns, cells[1:], strict=False) if one < other]
    return tuple(found)


def ports(text: str) -> tuple[tuple[int, int, int], ...]:
    """Return for each device how many links `nvidia-smi nvlink -s` calls up (with a speed) and down (`<inactive>`)."""
    found: dict[int, list[int]] = {}
    device = -1
    for line in text.splitlines():
        head = _PORTS.match(line)
        if head:
            device = int(head[1])
        elif device >= 0 and line.strip().startswith("Link "):
            counts = found.setdefault(device, [0, 0])
            counts["inactive" in line] += 1
    return tuple((index, up, down) for index, (up, down) in sorted(found.items()))
