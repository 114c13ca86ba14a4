"""What a cloud consists of, for whoever composes: the same for the embedded one and for AWS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpucloud.domain.job.spec import SshChoices
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.offer import Offer
from gpucloud.domain.supervision.seen import Rules
from gpucloud.ports import Account, BillingData, MarketData, NodeGroup, Provisioner
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
    knows_our_address: bool = False
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
