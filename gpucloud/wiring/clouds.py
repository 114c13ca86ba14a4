"""The clouds, composed: what each consists of, the embedded one, and own hosts; AWS has a module of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from gpucloud.adapters.home import Home
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.job.spec import SshChoices
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.supervision.snapshot import Limits, Rules
from gpucloud.domain.variables import GPUCLOUD_HANG_S, GPUCLOUD_HOME, GPUCLOUD_LOCAL_MONEY_FACTOR
from gpucloud.system.processes import user_name
from gpucloud.system.retries import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpucloud.adapters.hosts.cloud import Configured, SshProvisioner
    from gpucloud.adapters.hosts.group import SshNodeGroup
    from gpucloud.adapters.hosts.records import Place
    from gpucloud.adapters.local.group import LocalNodeGroup
    from gpucloud.adapters.local.market import LocalCensus
    from gpucloud.domain.offer import Offer
    from gpucloud.ports import Account, BillingData, MarketData, NodeGroup, Provisioner, Shell
    from gpucloud.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudProfile:
    """How a cloud is to be dealt with.

    Its rules and terms; how often it is looked at, and output is written to the store (in S3 a paid request each time);
    the command that ends a node from inside; the interpreter that nodes have; how long a node that runs may take until
    SSH answers; whether its firewall knows the address that we come from; how the user logs in where the hosts are
    his own, and have not got the job's key; the login as which machines make themselves fit, None where they do not;
    the login as which those of a job that drives itself do, None where they cannot.
    """

    rules: Rules
    terms: Terms
    period_s: float
    flush_s: float = 1.0
    power_off: tuple[str, ...] = ()
    node_python: str = "python3"
    connect_s: float = 15.0
    moved_to: Callable[[], str | None] | None = None
    own_login: SshChoices | None = None
    boots_as: str | None = None
    drives_as: str | None = None


class Cloud(Protocol):
    """One cloud as one job sees it. Nothing is asked of it before a method is called."""

    @property
    def cloud_profile(self) -> CloudProfile:
        """How to deal with it."""
        ...

    def account(self) -> Account | None:
        """Return who we are there; None where nobody asks."""
        ...

    def market(self) -> MarketData:
        """Return its prices."""
        ...

    def billing(self) -> BillingData | None:
        """Return what says what it charges; None where nobody sends a bill."""
        ...

    def group(self, store: ObjectStore) -> NodeGroup:
        """Return its node groups, for a job that keeps its state in this store."""
        ...

    def provisioner(self, store: ObjectStore) -> Provisioner:
        """Return what makes its free parts."""
        ...

    def default_store(self) -> str:
        """Return the URL of the store of jobs that name none."""
        ...

    def store_is_there(self) -> bool:
        """Whether the default store can be written to now."""
        ...

    def make_store(self) -> None:
        """Make the default store; may be repeated."""
        ...

    def remarks(self, offer: Offer) -> tuple[str, ...]:
        """Return what is emulated, or done in another way than users might think."""
        ...


def market_of(cloud: Cloud, name: CloudName) -> MarketData:
    """Return the cloud's prices; of any but the embedded one with those of machines that a job let go of there."""
    if name is CloudName.LOCAL:
        return cloud.market()
    from gpucloud.adapters.local.market import LocalMarket, MarketBesideEmbedded

    return MarketBesideEmbedded(cloud.market(), LocalMarket())


# The embedded cloud.


class LocalCloud:
    """Machines that are processes here."""

    profile = None

    def __init__(self, home: Home) -> None:
        self._home = home

    @property
    def cloud_profile(self) -> CloudProfile:
        """How it is dealt with: as AWS is, by a supervisor next door."""
        faster = _money_factor()
        prepaid_rule, terms = PrepaidRule(), Terms()
        prepaid_rule = PrepaidRule(
            horizon=prepaid_rule.horizon / faster,
            reserve=prepaid_rule.reserve / faster,
            least=prepaid_rule.least / faster,
            start=prepaid_rule.start / faster,
        )
        return CloudProfile(
            rules=Rules(prepaid_rule=prepaid_rule, limits=_limits()),
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

        return LocalNodeGroup(self._home.cloud, fleet=self._home.fleet)

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
        return EmbeddedProvisioner(self._home.fleet, direct, terraform, self._home.terraform)

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
        emulated = (
            "embedded fleet: nodes are processes of this machine, and nothing is billed;"
            f" a notice of 120 s runs as {notice_s:g} s"
        )
        without = "Terraform is not on PATH: the embedded fleet's group is made without it"
        return (emulated, *self._gpus(), *(() if find_terraform() else (without,)))

    def _gpus(self) -> tuple[str, ...]:
        from gpucloud.adapters.local.market import devices_here

        here = devices_here()
        return (f"GPUs here: {len(here.uuids)} × {here.model}; each node gets its own",) if here.uuids else ()


def _money_factor() -> float:
    """How much shorter than on AWS paid times are (horizon, reserve, least time, start): for drills and tests."""
    return float(os.environ.get(GPUCLOUD_LOCAL_MONEY_FACTOR, "1"))


def _limits() -> Limits:
    """Return limits for processes next door; GPUCLOUD_HANG_S scales a hang's for rehearsals, as notices are scaled."""
    hang = timedelta(seconds=float(os.environ.get(GPUCLOUD_HANG_S, "60")))
    return Limits(
        save=timedelta(seconds=60),
        hang_at_least=hang,
        hang_printed=10 * hang,
        alone=timedelta(seconds=60),
        changeover=timedelta(seconds=30),
        # Nobody is told that a shortage is over, and asking next door costs nothing.
        cooldown=timedelta(seconds=30),
        cooldown_longest=timedelta(minutes=1),
    )


# Hosts that the user has.


# A host that is busy or reboots may answer in a moment, another job's host is free when that job ends: asking again
# costs nothing. Lines may cross the internet.
_LIMITS = Limits(
    silent=timedelta(seconds=10),
    settle=timedelta(seconds=3),
    cooldown=timedelta(seconds=30),
    cooldown_longest=timedelta(minutes=5),
)
_CONNECT_S = 5.0


class SshCloud:
    """Hosts that the user has. Nothing is asked of them before a method is called."""

    def __init__(self, home: Home, choices: SshChoices) -> None:
        self._home = home
        self._choices = choices
        self.cloud_profile = CloudProfile(
            rules=Rules(prepaid_rule=PrepaidRule(), limits=_LIMITS),
            terms=Terms(minimum=timedelta(0)),
            period_s=0.25,
            flush_s=2.0,
            connect_s=30.0,
            own_login=choices,
        )

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The hosts as SSH reaches them. HostKeyMismatch when the key of one is not known."""
        from gpucloud.adapters.hosts.cloud import Sources, places
        from gpucloud.adapters.ssh.identity import known_key, usual_files

        files = usual_files()
        key_of = partial(known_key, files=files)
        return places(self._choices, Sources(configured=_configured, key_of=key_of, known_hosts=files[0]))

    def account(self) -> None:
        """Return None: they are the user's own."""

    def billing(self) -> None:
        """Return what sends a bill: nobody."""

    def market(self) -> MarketData:
        """Return the price that the user states."""
        from gpucloud.adapters.hosts.cloud import SshMarket

        return SshMarket(self._choices.usd_per_hour, SystemClock(), lambda: self.places)

    def group(self, store: ObjectStore) -> SshNodeGroup:
        """Return the groups of hosts of jobs that keep their state in this store."""
        from gpucloud.adapters.hosts.group import Asking, SshNodeGroup
        from gpucloud.adapters.hosts.records import Recollection

        return SshNodeGroup(Recollection(store, SystemClock()), Asking(self._shell), lambda: self.places)

    def provisioner(self, store: ObjectStore) -> SshProvisioner:
        """Return what keeps the record of who has the hosts."""
        from gpucloud.adapters.hosts.cloud import SshProvisioner

        group = self.group(store)
        return SshProvisioner(group.records, group)

    def default_store(self) -> str:
        """Return this user's own folder, which the hosts must share."""
        return self._home.store

    def store_is_there(self) -> bool:
        """Return True: the folder is made with the first object."""
        return True

    def make_store(self) -> None:
        """Do nothing."""

    def remarks(self, offer: Offer) -> tuple[str, ...]:  # noqa: ARG002  theirs are all alike
        """Return which hosts there are, in the order in which they are taken."""
        names = ", ".join(place.name for place in self.places)
        return (f"hosts, taken in this order: {names}; they are never switched off",)

    def _shell(self) -> Shell:
        from gpucloud.adapters.ssh.identity import UserKeys
        from gpucloud.adapters.ssh.shell import SshShell

        return SshShell(UserKeys(self._choices.key), connect_timeout_s=_CONNECT_S)


def _configured(alias: str) -> Configured:
    from gpucloud.adapters.hosts.cloud import Configured
    from gpucloud.adapters.ssh.identity import said_of

    said = said_of(alias)
    return Configured(address=said.address, user=said.user, port=said.port, jump=said.jump)
