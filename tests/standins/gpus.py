"""A stand-in `nvidia-smi`: it answers as a machine with so many healthy, idle GPUs of a model would.

Its XML is the genuine recording of an H200 (tests/data/nvidia_smi) with another name, memory, place and UUID.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from xml.etree import ElementTree

RECORDED = Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml"

_PROGRAM = """\
#!{python} -IS
import sys, time
from pathlib import Path

here = Path(__file__).parent
args = sys.argv[1:]
said = {rows!r}
option = next((a for a in args if a.startswith("--query-gpu=")), None)
if args[:2] == ["-q", "-x"]:
    sys.stdout.write((here / "nvidia-smi.xml").read_text())
elif args == ["-L"]:
    for row in said:
        print(f"GPU {{row['index']}}: {{row['name']}} (UUID: {{row['uuid']}})")
elif option:
    fields = option.split("=", 1)[1].split(",")
    period = next((int(args[args.index(o) + 1]) / f for o, f in (("-lms", 1000), ("-l", 1)) if o in args), None)
    while True:
        for row in said:
            print(", ".join(row.get(field, "[N/A]") for field in fields), flush=True)
        if period is None:
            break
        time.sleep(period)
else:
    sys.exit(f"this stand-in for nvidia-smi does not know {{args}}")
"""


def write_nvidia_smi(folder: Path, *, name: str, count: int, memory_mib: int) -> None:
    """Put the program, and the XML that it prints, into the folder."""
    (folder / "nvidia-smi.xml").write_text(xml(name, count, memory_mib))
    rows = [
        {
            "index": str(index),
            "uuid": uuid(index),
            "name": name,
            "driver_version": "580.159.04",
            "memory.total": str(memory_mib),
            "memory.used": "0",
            "utilization.gpu": "0",
            "temperature.gpu": "41",
            "power.draw": "70.00",
        }
        for index in range(count)
    ]
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, rows=rows))
    program.chmod(0o755)


def uuid(index: int) -> str:
    return f"GPU-{index:08}-0000-0000-0000-{index:012}"


def xml(name: str, count: int, memory_mib: int) -> str:
    root = ElementTree.parse(RECORDED).getroot()
    recorded = root.findall("gpu")
    for gpu in recorded:
        root.remove(gpu)
    for index in range(count):
        gpu = copy.deepcopy(recorded[0])
        gpu.set("id", f"00000000:00:{index + 6:02X}.0")
        for path, text in (
            ("product_name", name),
            ("uuid", uuid(index)),
            ("fb_memory_usage/total", f"{memory_mib} MiB"),
        ):
            found = gpu.find(path)
            assert found is not None
            found.text = text
        root.append(gpu)
    attached = root.find("attached_gpus")
    assert attached is not None
    attached.text = str(count)
    return ElementTree.tostring(root, encoding="unicode")
