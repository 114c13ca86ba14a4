"""The embedded cloud, composed."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from gpucloud.adapters.home import Home
from gpucloud.adapters.local.place import user_name
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.money.prepaid import Wall
from gpucloud.domain.supervision.seen import Limits, Rules
from gpucloud.domain.variables import GPUCLOUD_HANG_S, GPUCLOUD_HOME, GPUCLOUD_LOCAL_MONEY_FACTOR
from gpucloud.wiring.cloud import CloudProfile

if TYPE_CHECKING:
    from gpucloud.adapters.local.group import LocalNodeGroup
    from gpucloud.adapters.local.market import LocalCensus
    from gpucloud.domain.offer import Offer
    from gpucloud.ports import MarketData, Provisioner
    from gpucloud.store import ObjectStore


def _limits() -> Limits:
    """Return limits for processes next door; GPUCLOUD_HANG_S scales a hang's for rehearsals, as notices are scaled."""
    hang = timedelta(seconds=float(os.environ.get(GPUCLOUD_HANG_S, "60")))
    return Limits(
        save=timedelta(seconds=60),
        hang_at_least=hang,
        alone=timedelta(seconds=60),
        changeover=timedelta(seconds=30),
    )


class LocalCloud:
    """Machines that are processes here."""

    profile = None

    def __init__(self, home: Home) -> None:
        self._home = home

    @property
    def cloud_profile(self) -> CloudProfile:
        """How it is dealt with: as AWS is, by a supervisor next door."""
        faster = _money_factor()
        wall, terms = Wall(), Terms()
        wall = Wall(
            horizon=wall.horizon / faster,
            reserve=wall.reserve / faster,
            least=wall.least / faster,
            start=wall.start / faster,
        )
        return CloudProfile(
            rules=Rules(wall=wall, limits=_limits()),
            terms=Terms(minimum=terms.minimum / faster),
            period_s=0.1,
            node_python=sys.executable,
            drives_as=user_name(),
            power_off=(sys.executable, "-m", "gpucloud.adapters.local.node"),
        )

    def account(self) -> None:
        """Return None: it is this user's own machine."""

    def billing(self) -> None:
        """Return what sends a bill: nobody."""

    def market(self) -> MarketData:
        """Return the recorded prices."""
        from gpucloud.adapters.local.market import LocalMarket

        return LocalMarket()

    def nodes(self) -> LocalNodeGroup:
        """Return the node groups, with what only an emulated cloud can do."""
        from gpucloud.adapters.local.group import LocalNodeGroup

        return LocalNodeGroup(self._home.cloud)

    def group(self, store: ObjectStore) -> LocalNodeGroup:  # noqa: ARG002  host keys are known here
        """Return the node groups."""
        return self.nodes()

    def provisioner(self, store: ObjectStore) -> Provisioner:  # noqa: ARG002
        """Return Terraform where it is installed, else the function that its module calls."""
        from gpucloud.adapters.home import bundled
        from gpucloud.adapters.local.provision import EmbeddedProvisioner, LocalProvisioner
        from gpucloud.adapters.terraform import TerraformProvisioner, find_terraform

        direct, terraform = LocalProvisioner(self._home.cloud), None
        if find_terraform() is not None:
            env = {**os.environ, GPUCLOUD_HOME: str(self._home.root)}
            terraform = TerraformProvisioner(bundled("terraform", "local"), self._home.terraform, env)
        return EmbeddedProvisioner(direct, terraform, self._home.terraform)

    def census(self, store: ObjectStore) -> LocalCensus:
        """Return what lists everything of this cloud."""
        from gpucloud.adapters.local.market import LocalCensus

        return LocalCensus(self._home.cloud, self.provisioner(store))

    def default_store(self) -> str:
        """Return this user's own folder."""
        return self._home.store

    def store_is_there(self) -> bool:
        """Return True: the folder is made with the first object."""
        return True

    def make_store(self) -> None:
        """Do nothing."""

    def remarks(self, offer: Offer) -> tuple[str, ...]:  # noqa: ARG002  theirs are all alike
        """Return what is emulated."""
        from gpucloud.adapters.terraform import find_terraform

        notice_s = self.nodes().notice_seconds
        emulated = f"embedded fleet: nodes are processes of this machine; a notice of 120 s runs as {notice_s:g} s"
        without = "Terraform is not on PATH: the embedded fleet's group is made without it"
        return (emulated, *self._gpus(), *(() if find_terraform() else (without,)))

    def _gpus(self) -> tuple[str, ...]:
        from gpucloud.adapters.local.market import devices_here

        here = devices_here()
        return (f"GPUs here: {len(here.uuids)} × {here.model}; each node gets its own",) if here.uuids else ()


def _money_factor() -> float:
    """How much shorter than on AWS paid times are (horizon, reserve, least time, start): for drills and tests."""
    return float(os.environ.get(GPUCLOUD_LOCAL_MONEY_FACTOR, "1"))
