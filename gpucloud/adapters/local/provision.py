"""Makes and removes node groups of the embedded cloud; called by its Terraform module, or without Terraform.

`python -m gpucloud.adapters.local.provision ensure|destroy` reads GPUCLOUD_HOME (a folder) and GPUCLOUD_CLUSTER, JSON
with name, region, zones, node_type, market, tags, access (the public key), store and unattended; it prints
{"group_name": …}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpucloud.adapters.local import first_boot
from gpucloud.adapters.local.group import LocalNodeGroup, fleet_elsewhere, in_folder
from gpucloud.adapters.local.records import Folder, GroupRecord
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Fleet
from gpucloud.domain.variables import GPUCLOUD_CLUSTER, GPUCLOUD_HOME
from gpucloud.ports import ClusterSpec, Provisioner


class EmbeddedProvisioner:
    """Implements `Provisioner` with Terraform where there is one, and without it where there is none.

    Terraform may be installed or removed while a cluster lives: what is destroyed is gone whoever made it.
    `work_root` holds Terraform's folders. Groups are named after `fleet`; of another one none is removed.
    """

    def __init__(
        self, fleet: Callable[[], Fleet], direct: LocalProvisioner, terraform: Provisioner | None, work_root: Path
    ) -> None:
        self._fleet = fleet
        self._direct = direct
        self._terraform = terraform
        self._work_root = work_root

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  one region
        """Return the cluster's own name, after the fleet's."""
        return self._fleet().named(name)

    def image(self, region: str) -> None:
        """Return None: machines of this cloud have no image."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make the node group of size 0 and return its name."""
        return self._fleet().named((self._terraform or self._direct).ensure(spec, story=story))

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """End the group's nodes and remove it, with what Terraform remembers of it. FleetElsewhere, as `describe`."""
        if (away := fleet_elsewhere(group, self._fleet)) is not None:
            if away.is_here:
                raise away
            return
        group = in_folder(group)
        if self._terraform is not None:
            self._terraform.destroy(group, story=story)
        self._direct.destroy(group, story=story)
        if self._terraform is None:
            shutil.rmtree(self._work_root / group, ignore_errors=True)


class LocalProvisioner:
    """Implements `Provisioner` for the embedded cloud at `root`, where Terraform is absent."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  one region
        """Return the cluster's own name."""
        return name

    def image(self, region: str) -> None:
        """Return None: machines of this cloud have no image."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make the node group of size 0 and return its name, which is the cluster's."""
        name = ensure_group(self._root, spec)
        story(f"node group {name} is there, with no node")
        return name

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """End the group's nodes and remove it."""
        if delete_group(self._root, group):
            story(f"node group {group} is gone")


def ensure_group(root: Path, spec: ClusterSpec, *, user_data: str = "") -> str:
    """Make the group, or bring its settings up to date and leave its level alone; return its name.

    `user_data` is a shell script that every node runs when it starts; left out, the one of a job that drives itself.
    """
    if not user_data and spec.unattended:
        user_data = first_boot.user_data(spec.store, spec.name)
    folder = Folder(root)
    folder.create()
    wanted = GroupRecord(
        name=spec.name,
        region=spec.region,
        zones=spec.zones,
        node_type=spec.node_type,
        market=spec.market,
        tags=spec.tags,
        public_key=spec.public_key,
        store=spec.store,
        user_data=user_data,
    )
    with folder.locked():
        old = folder.group(spec.name)
        if old is not None:
            wanted = replace(
                wanted,
                size=old.size,
                pool=old.pool,
                armed_until=old.armed_until,
                launched=old.launched,
            )
        if wanted != old:
            folder.save_group(wanted)
    return spec.name


def delete_group(root: Path, name: str) -> bool:
    """End the group's nodes and remove every trace of it; return whether there was one."""
    folder = Folder(root)
    if not folder.exists or folder.group(name) is None:
        return False
    LocalNodeGroup(root).purge(name)
    with folder.locked():
        folder.remove_group(name)
    return True


def main() -> None:
    """Do what the command line says; an error is one line on stderr and its own exit code."""
    parser = argparse.ArgumentParser(prog="gpucloud.adapters.local.provision")
    parser.add_argument("action", choices=("ensure", "destroy"))
    action = parser.parse_args().action
    try:
        root = Path(_variable(GPUCLOUD_HOME)) / "cloud"
        spec, user_data = _cluster(_variable(GPUCLOUD_CLUSTER))
        if action == "ensure":
            ensure_group(root, spec, user_data=user_data)
        else:
            delete_group(root, spec.name)
    except GpucloudError as error:
        sys.stderr.write(f"{error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)
    sys.stdout.write(json.dumps({"group_name": spec.name}) + "\n")


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"{name} is not set", hint=f"set {name}; `gpucloud up` does so by itself")
    return value


def _cluster(text: str) -> tuple[ClusterSpec, str]:
    try:
        raw = json.loads(text)
        spec = ClusterSpec(
            name=raw["name"],
            region=raw["region"],
            zones=tuple(raw["zones"]),
            node_type=raw["node_type"],
            market=Market(raw["market"]),
            tags=tuple(sorted(raw["tags"].items())),
            public_key=raw["access"],
            store=raw["store"],
            unattended=raw.get("unattended", False),
        )
        return spec, raw.get("user_data") or ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"GPUCLOUD_CLUSTER cannot be read: {error!r}", hint="see the module's variables") from error


if __name__ == "__main__":
    main()
