"""AWS, composed: for the user's side, and for a machine of a job that drives itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from gpucloud.adapters.aws.nodes.listing import LEAST_AHEAD
from gpucloud.adapters.home import Home
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Access, AwsChoices, Resources
from gpucloud.domain.market.catalog import Catalog, aged
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.offer import EfaLayout
from gpucloud.domain.supervision.snapshot import Limits, Rules
from gpucloud.domain.variables import GPUCLOUD_AWS_POLL_S, GPUCLOUD_SSH_PORT
from gpucloud.wiring.clouds import CloudProfile

if TYPE_CHECKING:
    from gpucloud.adapters.aws.account import AwsAccount
    from gpucloud.adapters.aws.census import AwsCensus, CostExplorer
    from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
    from gpucloud.adapters.aws.policy import PrintedPolicies
    from gpucloud.adapters.aws.prices.market import AwsMarket, ListedMarket
    from gpucloud.adapters.aws.provision import AwsProvisioner
    from gpucloud.adapters.aws.session import Aws
    from gpucloud.adapters.aws.standing import OurAddress
    from gpucloud.domain.market.catalog import Caller
    from gpucloud.domain.offer import Offer
    from gpucloud.domain.supervision.self_driving import DriveOrder
    from gpucloud.ports import MarketData
    from gpucloud.store import ObjectStore


_PREPAID_RULE = PrepaidRule(
    reserve=timedelta(seconds=300),
    least=timedelta(minutes=15),
    start=timedelta(minutes=10),  # with the two minutes that a notice undoes, `Limits.changeover`
    ahead=LEAST_AHEAD,
)
# SSH crosses the internet, and the cloud's list is some seconds old: more patience than with processes next door.
_LIMITS = Limits(silent=timedelta(seconds=15), settle=timedelta(seconds=8), save=timedelta(seconds=90))


class AwsCloud:
    """AWS as one job's choices see it. Nothing is asked of AWS before a method is called."""

    def __init__(self, home: Home, choices: AwsChoices, resources: Resources) -> None:
        self._home = home
        self._choices = choices
        self._resources = resources

    @cached_property
    def aws(self) -> Aws:
        """The session: the job's first region, else the profile's or AWS_REGION."""
        from gpucloud.adapters.aws.session import Aws

        first = self._resources.regions[0] if self._resources.regions else None
        return Aws(self._choices.profile, first)

    @property
    def profile(self) -> str | None:
        """The profile that the job's choices name."""
        return self._choices.profile

    @property
    def regions(self) -> tuple[str, ...]:
        """Where machines may come from."""
        return self._resources.regions or (self.aws.region,)

    def require_regions(self, named: tuple[str, ...] = ()) -> None:
        """UsageError for a name that is no region: of those that are named, else the job's, else the user's own."""
        from gpucloud.adapters.aws.session import require_region

        for region in named or self._resources.regions:
            require_region(region, self.catalog.regions)
        if not named and not self._resources.regions and self.aws.knows_region:
            own = self.aws.region
            variable = next(
                (name for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if os.environ.get(name) == own), None
            )
            require_region(own, self.catalog.regions, variable or "the AWS profile's region")

    @cached_property
    def cloud_profile(self) -> CloudProfile:
        """How AWS is dealt with: a disk and an address are paid beside each machine."""
        from gpucloud.adapters.aws.machine import POWER_OFF
        from gpucloud.adapters.aws.prices.catalog import region_rates

        return CloudProfile(
            rules=Rules(prepaid_rule=_PREPAID_RULE, limits=_LIMITS),
            terms=Terms(
                disk_gib=self._choices.disk_gib,
                # The base's subnets give every machine an address; the user's own, what he wishes of them.
                public_address=self._choices.access is Access.PUBLIC or not self._choices.subnets,
                without_address=tuple(
                    name
                    for name, one in sorted(self.catalog.machines.items())
                    if one.fabric(self._resources.nodes).several
                ),
                rates=tuple(map(region_rates, self.regions)),
            ),
            period_s=min(0.5, poll_s()),
            flush_s=5.0,
            power_off=POWER_OFF,
            connect_s=600.0,
            moved_to=self._our_address.moved_to,
            boots_as=self._choices.user,
            drives_as=self._choices.user,
        )

    def account(self) -> AwsAccount:
        """Return who we are on AWS."""
        return self._account

    def billing(self) -> CostExplorer:
        """Return AWS's own figures."""
        from gpucloud.adapters.aws.census import CostExplorer

        return CostExplorer(self.aws)

    def market(self) -> AwsMarket:
        """Return AWS's prices."""
        return self._market

    def listed_market(self) -> ListedMarket:
        """Return the catalog's prices, for which nobody need be known to AWS."""
        from gpucloud.adapters.aws.prices.market import ListedMarket

        return ListedMarket(self.catalog, self.regions)

    def group(self, store: ObjectStore) -> AwsNodeGroup:
        """Return the node groups of jobs that keep their state in this store."""
        from gpucloud.adapters.aws.nodes.group import AwsNodeGroup

        return AwsNodeGroup(
            self.aws,
            user=self._choices.user,
            access=self._choices.access,
            host_key=self._host_keys(store),
            efa_of=lambda name: self.catalog.machine(name).fabric(self._resources.nodes),
            port=int(os.environ.get(GPUCLOUD_SSH_PORT, "22")),
            interval_s=poll_s(),
        )

    def provisioner(self, store: ObjectStore) -> AwsProvisioner:
        """Return Terraform over the two AWS modules."""
        return self._provisioner(store.url)

    def default_store(self) -> str:
        """Return the account's bucket in the first region."""
        from gpucloud.adapters.aws.bucket import bucket_name

        return f"s3://{bucket_name(self._caller.account, self.aws.region)}"

    def store_is_there(self) -> bool:
        """Whether the account's bucket exists."""
        from gpucloud.adapters.aws.bucket import bucket_exists

        return bucket_exists(self.aws, self.aws.region)

    def make_store(self) -> None:
        """Make the account's bucket, hardened."""
        from gpucloud.adapters.aws.bucket import ensure_bucket

        ensure_bucket(self.aws, self.aws.region)

    def remarks(self, offer: Offer) -> tuple[str, ...]:
        """Return how machines are reached, how old list prices are, and what could not be asked of the market."""
        return (self.way_in(offer), f"{self.list_remark()}; spot prices of now", *self._market.remarks)

    def list_remark(self) -> str:
        """Return how old list prices are, and which regions have no list of their own."""
        told = [aged(self.catalog.priced_on(self.regions), datetime.now(timezone.utc))]
        if assumed := self.catalog.assumed(self.regions):
            told.append(assumed)
        if unlisted := [name for name in self.regions if name not in self.catalog.prices]:
            told.append(f"none of {', '.join(unlisted)}, taken for the dearest there can be: gpucloud catalog refresh")
        return f"on-demand prices of {', '.join(told)}"

    def policies(self, *, account: str | None = None, region: str | None = None) -> PrintedPolicies:
        """Return what prints IAM policies: for the caller's account unless one is named."""
        from gpucloud.adapters.aws.policy import PrintedPolicies

        return PrintedPolicies(
            self._choices,
            self._resources,
            without_address=self._types_without_address,
            regions=self.catalog.regions,
            account=account,
            region=region,
        )

    def refresh_catalog(self, region: str, scored: tuple[str, ...] = ()) -> Catalog:
        """Ask AWS for the region's machines and prices, and these models' placement scores; return what is known now.

        Raises CredentialsError, ProvisionError; what was known before is then kept.
        """
        from gpucloud.adapters.aws.prices.asking import refresh

        return refresh(self.aws, region, self._home.catalog, scored=scored)

    def base_costs(self) -> tuple[tuple[str, Decimal], ...]:
        """Return what stands in the region without any job, with what each part costs a month, in USD."""
        costs = self._provisioner(self.default_store()).base(self.aws.region)
        return costs.monthly if costs is not None else ()

    def end_base(self, *, with_data: bool, story: Callable[[str], None]) -> tuple[str, ...]:
        """Remove the region's base and its bucket, with what is its user's only if `with_data`; return what is left."""
        from gpucloud.adapters.aws.bucket import remove_bucket

        self._provisioner(self.default_store()).destroy_base(self.aws.region, story=story)
        try:
            remove_bucket(self.aws, self.aws.region, with_data=with_data)
        except UsageError as kept:
            story(f"kept: {kept.message}; {kept.hint}")
            return (self.default_store(),)
        return ()

    @cached_property
    def catalog(self) -> Catalog:
        """The machines and prices that count: the package's, and what was refreshed. UsageError: it is damaged."""
        from gpucloud.adapters.aws.prices import catalog

        return catalog.load(self._home.catalog)

    @cached_property
    def _account(self) -> AwsAccount:
        from gpucloud.adapters.aws.account import AwsAccount

        return AwsAccount(self.aws, catalog=self.catalog)

    @cached_property
    def _market(self) -> AwsMarket:
        from gpucloud.adapters.aws.prices.market import AwsMarket

        return AwsMarket(self.aws, self.regions, catalog=self.catalog, renew=self._renew_prices)

    def _renew_prices(self, region: str) -> Catalog:
        from gpucloud.adapters.aws.prices.asking import renew_prices

        self.__dict__["catalog"] = renew_prices(self.aws, region, self._home.catalog)
        return self.catalog

    @cached_property
    def _caller(self) -> Caller:
        return self._account.caller()

    def census(self, store: ObjectStore) -> AwsCensus:
        """Return what lists everything that jobs with this store have made in the regions."""
        from gpucloud.adapters.aws.census import AwsCensus

        return AwsCensus(
            self.aws,
            self._caller.account,
            self.regions,
            group=self.group(store),
            provisioner=self.provisioner(store),
        )

    def _provisioner(self, store_url: str) -> AwsProvisioner:
        from gpucloud.adapters.aws import machine
        from gpucloud.adapters.aws.bucket import ensure_bucket
        from gpucloud.adapters.aws.machine import user_data
        from gpucloud.adapters.aws.provision import AwsProvisioner, Sources
        from gpucloud.adapters.aws.standing import require_session_tools

        sources = Sources(
            bucket=partial(ensure_bucket, self.aws),
            user_data=user_data,
            image=partial(machine.resolve, self.aws, self._choices),
            root_device=cache(partial(machine.root_device, self.aws)),
            ssh_cidr=self._our_address.ask,
            session_tools=require_session_tools,
        )
        return AwsProvisioner(
            self.aws, home=self._home.root, choices=self._choices, store_url=store_url, sources=sources
        )

    @cached_property
    def _our_address(self) -> OurAddress:
        from gpucloud.adapters.aws.standing import OurAddress

        return OurAddress()

    def _types_without_address(self) -> tuple[str, ...]:
        """Return the types that the job may get and that AWS gives no public address."""
        fitting = self.catalog.fitting(self._resources)
        return tuple(one.name for one in fitting if one.fabric(self._resources.nodes).several)

    def way_in(self, offer: Offer) -> str:
        """Return how machines of the offer are reached, and what their way out costs where they have no address."""
        access = offer.efa.access(self._choices.access)
        if not offer.efa.several:
            return f"machines are reached by SSH: {access.value}"
        told = f"{offer.pool.instance_type} has {offer.efa.interfaces} EFA interfaces and so no public address:"
        if self._choices.subnets:
            return f"{told} it is reached by SSH: {access.value}; its way out is that of your subnets"
        return (
            f"{told} it is reached by SSH: {access.value}, and gets out by a NAT gateway, which costs 36.50 USD a month"
            " until `gpucloud down --base`, and 0.045 USD per GB (none of it for S3 in its region); both are outside"
            " the budget and the worst cost"
        )

    def _host_keys(self, store: ObjectStore) -> Callable[[str, str, str], str | None]:
        from gpucloud.adapters.aws.account import profile_of
        from gpucloud.adapters.aws.machine import HostKeys

        known: dict[tuple[str, str], HostKeys] = {}
        own = self._choices.instance_profile

        @cache
        def role_id() -> str | None:
            """Of many roles that may write into the store, the one that machines with the user's own profile have."""
            return profile_of(self.aws, own).role_id if own is not None else None

        def of(region: str, cluster: str, instance_id: str) -> str | None:
            keys = known.get((region, cluster)) or known.setdefault(
                (region, cluster), HostKeys(store, cluster, role_id=role_id(), console=partial(self._console, region))
            )
            return keys.of(instance_id)

        return of

    def _console(self, region: str, instance_id: str) -> str | None:
        with self.aws.calling("ec2", f"read the console of {instance_id}", region) as ec2:
            output = ec2.get_console_output(InstanceId=instance_id, Latest=True).get("Output")
            return str(output) if output else None


def poll_s() -> float:
    """How old the cloud's list may be, in seconds; an emulated cloud may be asked more often."""
    return float(os.environ.get(GPUCLOUD_AWS_POLL_S, "3"))


# AWS as a machine of a job has it that drives itself: its own group and what things cost, with its role's rights.


def own_nodes(order: DriveOrder, store: ObjectStore) -> AwsNodeGroup:
    """Return the node groups as a machine reaches them: its peers by their private addresses, with host keys that its
    own role published; the instance's own role signs, and no bound or shut-off is moved. Raises ProvisionError.
    """
    from gpucloud.adapters.aws.account import role_id_of
    from gpucloud.adapters.aws.machine import HostKeys
    from gpucloud.adapters.aws.nodes.group import AwsNodeGroup

    aws = _own_session(order)
    keys = HostKeys(store, order.cluster, role_id=role_id_of(aws))
    return AwsNodeGroup(
        aws,
        user=order.job.aws.user,
        access=Access.PRIVATE,
        host_key=lambda region, cluster, instance_id: keys.of(instance_id),  # noqa: ARG005  one cluster
        efa_of=lambda _: EfaLayout(),
        port=int(os.environ.get(GPUCLOUD_SSH_PORT, "22")),
        interval_s=poll_s(),
        own=True,
    )


def own_market(order: DriveOrder) -> MarketData:
    """Return what machines of the order's region cost; none is offered, for a machine buys none elsewhere."""
    from gpucloud.adapters.aws.prices.catalog import load
    from gpucloud.adapters.aws.prices.market import AwsMarket
    from gpucloud.adapters.local.market import LocalMarket, MarketBesideEmbedded
    from gpucloud.usecases.services import OwnMarket

    aws = _own_session(order)
    catalog = load().with_prices(aws.region, dict(order.on_demand))
    return OwnMarket(MarketBesideEmbedded(AwsMarket(aws, (aws.region,), catalog=catalog), LocalMarket()))


def _own_session(order: DriveOrder) -> Aws:
    """No profile: whatever the user calls his, the machine has its role."""
    from gpucloud.adapters.aws.session import Aws

    return Aws(None, order.region)
