"""What went wrong at AWS, in our words: a code's meaning, and errors of boto3 as errors of gpucloud (DESIGN §7)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import botocore.exceptions

from gpucloud.adapters.aws.codes import CODES, NOT_YET, PROSE, SETTLING, UNKNOWN, Known
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.node import Fault

__all__ = ["Known", "code_in", "code_of", "explained", "known", "known_of_new"]


def known(code: str) -> Known:
    """Return what the code means; a code that is not in the table is UNKNOWN: stop safely."""
    return CODES.get(code) or CODES.get(_bare(code)) or UNKNOWN


def known_of_new(code: str, text: str) -> Known:
    """Return what the code means in a cluster that was made a moment ago; `text` is what AWS says beside it."""
    new = _bare(code) in SETTLING or "iam instance profile" in text.lower()
    return NOT_YET if new and known(code).fault is Fault.PARAMETER else known(code)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn boto3's errors in the block into CredentialsError or ProvisionError: "cannot <what>: <line> (<code>)"."""
    try:
        yield
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        meaning = known(code_of(error))
        kind = CredentialsError if meaning.fault is Fault.CREDENTIALS else ProvisionError
        message = f"cannot {what}: {_said(meaning, error)} ({code_of(error)})"
        may_pass = meaning.fault in (Fault.THROTTLING, Fault.TRANSIENT)
        raise kind(message, hint=meaning.step, may_pass=may_pass) from error


def code_of(error: BaseException) -> str:
    """Return AWS's code of an error, else the name of botocore's class."""
    return _part(error, "Code") or type(error).__name__


def code_in(text: str) -> str:
    """Return the code behind a scaling activity's message or an instance's state reason; "" when there is none.

    A code that stands in the text is taken as it stands; else the words that AWS uses for one decide.
    """
    for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:\.[A-Za-z][A-Za-z0-9]*)*", text):
        # Words of one hump ("Throttling", "Unsupported", "Blocked") are plain English too.
        if re.search(r"[a-z][A-Z]", word) and known(word) is not UNKNOWN:
            return word if word in CODES else _bare(word)
    return next((code for words, code in PROSE if re.search(words, text, re.IGNORECASE)), "")


def _bare(code: str) -> str:
    return re.sub(r"^(Client|Server)\.", "", code)


def _part(error: BaseException, name: str) -> str:
    # Errors of the connection have a `response` too, which is None.
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get(name, "")) if isinstance(response, dict) else ""


def _said(meaning: Known, error: Exception) -> str:
    """What people are told: our line, with the part of AWS's own words that no table can know."""
    own = _part(error, "Message") or str(error)
    match meaning.fault:
        case Fault.PERMISSION:
            action = re.search(r"not authorized to perform: ([\w:*-]+)", own)
            return f"{meaning.line}: {action[1]}" if action else meaning.line
        case Fault.PARAMETER:
            return f"{meaning.line}: {own[:300]}"
        case Fault.UNKNOWN:
            return own[:300]
        case Fault.CAPACITY | Fault.QUOTA | Fault.CREDENTIALS | Fault.THROTTLING | Fault.TRANSIENT:
            return meaning.line
