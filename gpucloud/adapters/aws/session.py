"""The one door to boto3: clients by service and region, made once, with errors told in our words."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta, timezone
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import boto3.session
import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.regions

from gpucloud.adapters.aws.faults import explained
from gpucloud.domain.errors import CredentialsError, UsageError

# Standard mode counts the first call too: a call that fails is tried twice more, with jitter, for some seconds.
_CONFIG = botocore.config.Config(
    connect_timeout=5,
    read_timeout=30,
    retries={"mode": "standard", "total_max_attempts": 5},
    user_agent_extra="gpucloud",
)
# Whoever is not known must hear it within 3 seconds: no metadata service is waited for on a laptop.
_QUICK = botocore.config.Config(connect_timeout=1.4, read_timeout=2.5, retries={"total_max_attempts": 1})


_LIKE_A_REGION = r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}"
# What a clock may differ before the difference counts: AWS tells whole seconds, and an answer takes its time.
_ALIKE = timedelta(seconds=3)


class Aws:
    """One AWS identity. Honours the whole AWS environment: profiles, SSO, AWS_ENDPOINT_URL; thread-safe."""

    def __init__(self, profile: str | None = None, region: str | None = None) -> None:
        """`region` is the job's first one; left out, the profile's or AWS_REGION. CredentialsError: no such profile."""
        try:
            # boto3 itself reads AWS_DEFAULT_REGION only.
            named = region or os.environ.get("AWS_REGION")
            self._session = boto3.session.Session(profile_name=profile, region_name=named)
        except botocore.exceptions.ProfileNotFound as error:
            raise CredentialsError(str(error), hint="name one of `aws configure list-profiles`") from error
        self.profile = self._session.profile_name if self._session.profile_name != "default" else profile
        self._region: str | None = self._session.region_name
        self._session.events.register("after-call", self._hear_time)
        self._ahead = timedelta(0)
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._lock = threading.Lock()

    @property
    def region(self) -> str:
        """The region of calls that name none. UsageError when none is known."""
        if not self._region:
            raise UsageError("no AWS region is known", hint="resources: {regions: [us-east-1]}, or set AWS_REGION")
        return self._region

    @property
    def knows_region(self) -> bool:
        """Whether a region is named anywhere."""
        return bool(self._region)

    def now(self) -> datetime:
        """Return the time by AWS's own clock, as its last answer told it; before the first, by this machine's."""
        return datetime.now(timezone.utc) - self._ahead

    @property
    def partition(self) -> str:
        """`aws`, `aws-cn`, `aws-us-gov`: what ARNs begin with."""
        return str(self._session.get_partition_for_region(self.region))

    def client(self, service: str, region: str | None = None, *, quick: bool = False) -> Any:
        """Return the boto3 client; `quick` ones give up within 3 s."""
        key = (service, region or self.region, quick)
        with self._lock:
            if key not in self._clients:
                self._require_commercial(key[1])
                with explained(f"open {service}"):
                    self._clients[key] = self._session.client(
                        service, region_name=key[1], config=_CONFIG.merge(_QUICK) if quick else _CONFIG
                    )
            return self._clients[key]

    def _hear_time(self, parsed: Any = None, **_: Any) -> None:
        """Take the time from an answer: schedules run by AWS's clock, whatever this machine's says."""
        told = (parsed or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        with contextlib.suppress(TypeError, ValueError):  # no answer must fail for its date
            ahead = datetime.now(timezone.utc) - parsedate_to_datetime(told)
            self._ahead = ahead if abs(ahead) > _ALIKE else timedelta(0)

    def _require_commercial(self, region: str) -> None:
        with contextlib.suppress(
            botocore.exceptions.BotoCoreError
        ):  # a region that botocore does not know: AWS will say
            _require_aws(region, self._session.get_partition_for_region(region))

    @contextlib.contextmanager
    def calling(self, service: str, what: str, region: str | None = None) -> Iterator[Any]:
        """Give the client; whatever it raises in the block becomes ours. `what` completes "cannot …"."""
        client = self.client(service, region)
        with explained(what):
            yield client


def require_region(region: str, known: Collection[str] = (), said_by: str | None = None) -> None:
    """UsageError with the nearest name for what is no region of AWS; nobody is asked.

    `known` are those of a catalog, which may have been refreshed for one that is newer than botocore. `said_by` is what
    named it, where that is neither the job file nor an option.
    """
    if region in known:
        return
    endpoints = _endpoints()
    parts = [endpoints.get_available_endpoints("ec2", part) for part in endpoints.get_available_partitions()]
    if any(region in part for part in parts):
        return
    close = get_close_matches(region.lower(), {*known, *endpoints.get_available_endpoints("ec2")}, n=1)
    near = f"did you mean {close[0]}?" if close else "us-east-1, for example"
    newer = f"{near}{'' if close else ';'} if AWS has opened it since: gpucloud catalog refresh --region {region}"
    hint = newer if re.fullmatch(_LIKE_A_REGION, region) else near
    raise UsageError(f"{f'{said_by}: ' if said_by else ''}{region} is no AWS region", hint=hint)


def partition_of(region: str, known: Collection[str] = ()) -> str:
    """Return the partition of a region, asking nobody. UsageError: it is no region, or none that gpucloud rents in."""
    require_region(region, known)
    # By its pattern: botocore need not have heard of a region that the catalog knows.
    partition = str(_endpoints().get_partition_for_region(region))
    _require_aws(region, partition)
    return partition


@cache
def _endpoints() -> botocore.regions.EndpointResolver:
    # A session would read the user's profiles, of which none may be there.
    return botocore.regions.EndpointResolver(botocore.loaders.create_loader().load_data("endpoints"))


def _require_aws(region: str, partition: str) -> None:
    """Elsewhere prices are in another currency or listed for another account, and drills do not exist."""
    if partition != "aws":
        raise UsageError(
            f"{region} is in {partition}; gpucloud rents in AWS's commercial regions only",
            hint="resources: {regions: [us-east-1]}, or a profile of a commercial account",
        )
