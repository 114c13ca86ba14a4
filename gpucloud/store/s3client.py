"""boto3's clients for AWS's S3 and for other servers that speak its protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BUSY = {
    "SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestTimeout",
    "ConditionalRequestConflict", "409",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A bucket: `client` asks and `signer` signs URLs; `verifies`: the server checks the CRC32s that it is sent.

    `refusal` (status, code, message, operation) and `cut_off` make botocore's errors, so that all of a store's are
    told alike; `errors` are the ones that a client raises.
    """

    bucket: str
    client: Any
    signer: Any
    verifies: bool
    refusal: Callable[[int, str, str, str], Exception]
    cut_off: Callable[[BaseException], Exception]
    errors: tuple[type[Exception], ...]


def make_client(session: Any, config: Any, *, connections: int = 10, region: str | None = None) -> Any:
    """Return a client for AWS's S3 or another server's, which `connections` threads may share."""
    timing = config(connect_timeout=5, read_timeout=60, retries={"mode": "standard", "max_attempts": 5})
    timing = timing.merge(config(max_pool_connections=connections))
    client = session.client("s3", config=timing, region_name=region)
    if is_aws(client):
        return client
    client.close()
    return session.client("s3", config=timing.merge(_plain(config)), region_name=region)


def make_signer(session: Any, config: Any, client: Any, bucket: str) -> Any:
    """Return a client that signs URLs which the endpoint of `client` takes.

    Left alone, botocore signs them as no longer accepted everywhere (version 2), and for a host that sends buckets
    outside us-east-1 elsewhere.
    """
    signing = config(signature_version="s3v4")
    if not is_aws(client):
        return session.client("s3", config=_plain(config).merge(signing))
    if "." not in bucket:
        return session.client("s3", config=signing.merge(config(s3={"addressing_style": "virtual"})))
    # A certificate covers no bucket with a dot in its name; with the endpoint given, the URL has its region's host.
    return session.client("s3", config=signing, endpoint_url=client.meta.endpoint_url)


def authorities(settings: Any) -> str:
    """Return the file of CA certificates that botocore would trust; `settings` is its session."""
    import botocore.httpsession  # noqa: PLC0415 - late, as all of botocore

    named = settings.get_config_variable("ca_bundle")
    return str(named or botocore.httpsession.get_cert_path(verify=True))


def refusal(status: int, code: str, message: str, operation: str) -> tuple[dict[str, Any], str]:
    """Return what botocore's ClientError is made of."""
    told = {"Code": code or str(status), "Message": message}
    return {"Error": told, "ResponseMetadata": {"HTTPStatusCode": status}}, operation


def is_aws(client: Any) -> bool:
    """Whether the client talks to AWS itself."""
    return ".amazonaws." in client.meta.endpoint_url


def error_code(error: Any) -> str:
    """Return S3's own code of a refusal; empty for other errors."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def may_pass(error: Any) -> bool:
    """Whether the server was busy or could not be reached, rather than unwilling."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return any(word in type(error).__name__ for word in ("Connect", "Timeout", "Endpoint", "HTTPClient"))
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500 or error_code(error) in _BUSY


def _plain(config: Any) -> Any:
    # Other servers answer 501 or MissingContentLength to botocore's default trailing checksums, and seldom have
    # a host name for each bucket.
    return config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
