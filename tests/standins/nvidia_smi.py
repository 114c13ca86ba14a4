"""A stand-in for `nvidia-smi --query-gpu … -lms`, where there is no GPU: it writes rows in the form of the recordings.

Asked for XML it answers with the genuine recording. It obeys a file beside it:
`{"gpus": 4, "use": [90, 90, 90, 90], "hang": true, "say": "…", "exit": 15, "ecc": [0, …]}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROGRAM = """#!{python} -IS
import json, pathlib, sys, time
orders = pathlib.Path({orders!r})
if "-x" in sys.argv:
    print(pathlib.Path({recording!r}).read_text())
    sys.exit(0)
pathlib.Path({started!r}).open("a").write("x")
every = int(sys.argv[sys.argv.index("-lms") + 1]) / 1000
fields = sys.argv[1].partition("=")[2].split(",")
while True:
    now = json.loads(orders.read_text())
    if now.get("refuse") in fields:
        print('Field "%s" is not a valid field to query.' % now["refuse"], flush=True)
        sys.exit(2)
    if "say" in now:
        print(now["say"], flush=True)
    if "exit" in now:
        sys.exit(now["exit"])
    if not now.get("hang"):
        rows = []
        for i in range(now["gpus"]):
            said = {{
                "index": i, "uuid": "GPU-0000000%d-0000-0000-0000-00000000000%d" % (i, i),
                "pci.bus_id": "00000000:%02X:00.0" % (4 + i), "utilization.gpu": now.get("use", [90] * 8)[i],
                "memory.used": 70000, "memory.total": 143771, "temperature.gpu": 60 + i, "power.draw": "512.25",
                "power.limit": "700.00", "clocks.sm": 1980, "clocks_event_reasons.active": "0x0000000000000004",
                "clocks_throttle_reasons.active": "0x0000000000000004",
                "ecc.errors.uncorrected.volatile.total": now.get("ecc", [0] * 8)[i],
            }}
            rows.append(", ".join(str(said[name]) for name in fields))
        print("\\n".join(rows), flush=True)
    time.sleep(every)
"""

RECORDING = Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml"


class NvidiaSmi:
    """The program in `folder`, which goes to the front of a PATH."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "nvidia-smi"
        self._orders = folder / "orders.json"
        self._started = folder / "started"
        self.order(gpus=4)
        text = PROGRAM.format(
            python=sys.executable, orders=str(self._orders), started=str(self._started), recording=str(RECORDING)
        )
        self.path.write_text(text)
        self.path.chmod(0o755)

    def order(self, **orders: object) -> None:
        """Behave so from the next round on."""
        beside = self._orders.with_suffix(".new")
        beside.write_text(json.dumps(orders))
        beside.replace(self._orders)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return len(self._started.read_text()) if self._started.exists() else 0
