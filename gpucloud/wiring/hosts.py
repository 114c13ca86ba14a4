"""Own hosts, composed."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.home import Home
from gpucloud.domain.job.spec import SshChoices
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.money.prepaid import Wall
from gpucloud.domain.supervision.seen import Limits, Rules
from gpucloud.wiring.cloud import CloudProfile

if TYPE_CHECKING:
    from gpucloud.adapters.hosts.cloud import Configured, SshProvisioner
    from gpucloud.adapters.hosts.group import SshNodeGroup
    from gpucloud.adapters.hosts.records import Place
    from gpucloud.domain.offer import Offer
    from gpucloud.ports import MarketData, Shell
    from gpucloud.store import ObjectStore

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
            rules=Rules(wall=Wall(), limits=_LIMITS),
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
