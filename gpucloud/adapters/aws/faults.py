"""AWS's error codes: what kind each is, one line for people, and the next step (DESIGN §7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import botocore.exceptions

from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.node import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a code means: `line` says it to people, `step` is the hint."""

    fault: Fault
    line: str
    step: str


def known(code: str) -> Known:
    """Return what the code means; a code that is not in the table is UNKNOWN: stop safely."""
    return _TABLE.get(code, _UNKNOWN)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn boto3's errors in the block into CredentialsError or ProvisionError: "cannot <what>: <line> (<code>)"."""
    try:
        yield
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        meaning = known(code_of(error))
        kind = CredentialsError if meaning.fault is Fault.CREDENTIALS else ProvisionError
        raise kind(f"cannot {what}: {meaning.line or error} ({code_of(error)})", hint=meaning.step) from error


def code_of(error: BaseException) -> str:
    """Return AWS's code of an error, else the name of botocore's class."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    return str(code) or type(error).__name__


_UNKNOWN = Known(fault=Fault.UNKNOWN, line="", step="nothing more is started; look the code up, then the same command")

_TABLE: dict[str, Known] = {
    "ExpiredToken": Known(
        fault=Fault.CREDENTIALS, line="the credentials have expired", step="log in again: `aws sso login`"
    ),
}
