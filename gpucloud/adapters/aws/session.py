"""The one door to boto3: clients by service and region, made once, with errors told in our words."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import boto3.session
import botocore.config
import botocore.exceptions

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
_QUICK = botocore.config.Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 1})


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
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._lock = threading.Lock()

    @property
    def region(self) -> str:
        """The region of calls that name none. UsageError when none is known."""
        if not self._region:
            raise UsageError("no AWS region is known", hint="resources: {regions: [us-east-1]}, or set AWS_REGION")
        return self._region

    @property
    def partition(self) -> str:
        """`aws`, `aws-cn`, `aws-us-gov`: what ARNs begin with."""
        return str(self._session.get_partition_for_region(self.region))

    def client(self, service: str, region: str | None = None, *, quick: bool = False) -> Any:
        """Return the boto3 client; `quick` ones give up within 3 s."""
        key = (service, region or self.region, quick)
        with self._lock:
            if key not in self._clients:
                with explained(f"open {service}"):
                    self._clients[key] = self._session.client(
                        service, region_name=key[1], config=_CONFIG.merge(_QUICK) if quick else _CONFIG
                    )
            return self._clients[key]

    @contextlib.contextmanager
    def calling(self, service: str, what: str, region: str | None = None) -> Iterator[Any]:
        """Give the client; whatever it raises in the block becomes ours. `what` completes "cannot …"."""
        client = self.client(service, region)
        with explained(what):
            yield client
