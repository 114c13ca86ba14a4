"""The real Terraform over terraform/local, with a stand-in for the embedded cloud's own function."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpucloud.adapters.home import bundled
from gpucloud.adapters.terraform import TerraformProvisioner
from gpucloud.domain.job.spec import Market
from gpucloud.ports import ClusterSpec

# Called as `$GPUCLOUD_PYTHON -m gpucloud.adapters.local.provision ensure|destroy`. `wait` holds it until it is removed.
_SCRIPT = """#!{python} -IS
import json, os, pathlib, sys, time
root, verb, spec = pathlib.Path({root!r}), sys.argv[3], json.loads(os.environ["GPUCLOUD_CLUSTER"])
assert sys.argv[1:3] == ["-m", "gpucloud.adapters.local.provision"], sys.argv
with (root / "calls").open("a") as calls:
    calls.write(verb + "\\n")
if (root / "leave-daemon").exists() and os.fork() == 0:
    (root / "daemon").write_text(str(os.getpid()))
    os.setsid()
    for fd in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    time.sleep(60)
while (root / "wait").exists():
    time.sleep(0.01)
if (root / "refusal").exists():
    sys.exit((root / "refusal").read_text())
made = root / "clusters" / spec["name"]
if verb == "ensure":
    made.write_text(json.dumps(spec))
    print(json.dumps({{"group_name": spec["name"]}}))
else:
    made.unlink(missing_ok=True)
"""


class StandIn:
    """A program that records clusters as files under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.program = root / "stand-in"
        (root / "clusters").mkdir(exist_ok=True)
        if not self.program.exists():
            self.program.write_text(_SCRIPT.format(python=sys.executable, root=str(root)))
            self.program.chmod(0o700)

    def clusters(self) -> dict[str, ClusterSpec]:
        """What has been made and not been removed."""
        specs = [json.loads(path.read_text()) for path in (self.root / "clusters").iterdir()]
        return {spec["name"]: _spec(spec) for spec in specs}

    def calls(self) -> list[str]:
        """The verbs that the program was called with, in order."""
        calls = self.root / "calls"
        return calls.read_text().split() if calls.exists() else []

    def refuse(self, text: str | None) -> None:
        """Fail every call with this text from now on; None: no more."""
        self._set("refusal", text)

    def hold(self, *, on: bool) -> None:
        """Let every call hang until `hold(on=False)`."""
        self._set("wait", "" if on else None)

    def leave_daemon(self) -> None:
        """Let the next call start a daemon, as a careless program does: every descriptor above 2 stays open."""
        self._set("leave-daemon", "")

    def _set(self, name: str, text: str | None) -> None:
        path = self.root / name
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)


def terraform_over(stand_in: StandIn, *, limit_s: float = 60.0, **env: str) -> TerraformProvisioner:
    """The Terraform adapter with the embedded cloud's module, whose function is the stand-in."""
    everything = {**os.environ, "GPUCLOUD_PYTHON": str(stand_in.program), **env}
    module = bundled("terraform", "local")
    return TerraformProvisioner(module, stand_in.root / "work", everything, limit_s=limit_s)


def _spec(values: dict[str, object]) -> ClusterSpec:
    return ClusterSpec(
        name=values["name"],
        region=values["region"],
        zones=tuple(values["zones"]),
        node_type=values["node_type"],
        market=Market(values["market"]),
        tags=tuple(sorted(values["tags"].items())),
        public_key=values["access"],
        store=values["store"],
    )
