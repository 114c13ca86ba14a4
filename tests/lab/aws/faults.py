"""Faults of the emulated AWS: errors in each protocol's own form, lost replies, expired credentials."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Literal
from xml.sax.saxutils import escape

from tests.lab.aws.calls import Call
from tests.lab.aws.world import ACCESS_KEY

Reply = tuple[int, str, bytes]  # status, content type, body
_JSON = ("ssm", "servicequotas", "budgets", "pricing", "logs", "events", "fis", "ce", "dynamodb")


@dataclass(slots=True, kw_only=True)
class Fault:
    """One rule: which calls fail, how, and how often. `before`: not applied; `after`: applied, the reply is lost."""

    action: str = "*"
    service: str = "*"
    code: str = "RequestLimitExceeded"
    message: str = "Request limit exceeded."
    status: int = 503
    times: int | None = 1
    share: float = 1.0
    when: Literal["before", "after"] = "before"
    match: bytes = b""
    skip: int = 0
    until: float | None = None
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def strikes(self, call: Call, body: bytes) -> bool:
        """Tell whether this call fails; counts itself down."""
        if self.action not in {"*", call.action} or self.service not in {"*", call.service}:
            return False
        if self.match not in body or self.times == 0 or (self.until is not None and time.time() >= self.until):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.random.random() >= self.share:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(slots=True, kw_only=True)
class Bucket(Fault):
    """A rate limit as AWS has it: `burst` calls at once, then `per_second`; what is too much is refused."""

    burst: float
    per_second: float
    _left: float | None = None
    _at: float = 0.0

    def strikes(self, call: Call, body: bytes) -> bool:
        """Tell whether this call is one too many; takes a token else."""
        if self.action not in {"*", call.action} or self.service not in {"*", call.service}:
            return False
        left = self.burst if self._left is None else self._left + (call.at - self._at) * self.per_second
        left, self._at = min(self.burst, left), call.at
        self._left = left - 1 if left >= 1 else left
        return left < 1


class Faults:
    """The rules in force. Thread-safe."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []
        self._lock = threading.Lock()
        self._expired: tuple[float, str | None] | None = None  # from when, whose key (None: everybody's)

    def add(
        self,
        action: str = "*",
        *,
        service: str = "*",
        code: str = "RequestLimitExceeded",
        message: str = "",
        status: int = 503,
        times: int | None = None,
        share: float = 1.0,
        when: Literal["before", "after"] = "before",
        match: bytes = b"",
        skip: int = 0,
        seconds: float | None = None,
        seed: int = 0,
    ) -> Fault:
        """Put a rule in force; a rule without `times`, `share` and `seconds` strikes once."""
        once = times is None and share >= 1.0 and seconds is None
        fault = Fault(
            action=action, service=service, code=code, message=message or f"{code} (put in by the lab)", status=status,
            times=1 if once else times, share=share, when=when, match=match, skip=skip,
            until=None if seconds is None else time.time() + seconds, random=random.Random(seed),
        )  # fmt: skip
        with self._lock:
            self._rules.append(fault)
        return fault

    def limit(self, action: str, *, service: str, burst: float, per_second: float, code: str, status: int) -> None:
        """Let no more than so many calls of an action through."""
        rule = Bucket(
            action=action, service=service, burst=burst, per_second=per_second, code=code,
            message="Rate exceeded", status=status, times=None,
        )  # fmt: skip
        with self._lock:
            self._rules.append(rule)

    def clear(self) -> None:
        """Lift every rule."""
        with self._lock:
            self._rules.clear()
            self._expired = None

    def expire_credentials(self, at: float | None = None, *, key: str | None = ACCESS_KEY) -> None:
        """Refuse a key's calls from a moment on (seconds since the epoch; left out: now); None: everybody's.

        The keys of instances' roles are their own: a laptop's session that has ended does not stop a node.
        """
        self._expired = (time.time() if at is None else at, key)

    def of(self, call: Call, body: bytes) -> Fault | None:
        """Return the rule that strikes this call."""
        since, whose = self._expired or (float("inf"), None)
        if time.time() >= since and whose in {None, call.key}:
            code, status = expired(call.service)
            return Fault(code=code, message="The security token included in the request is expired", status=status)
        with self._lock:
            return next((rule for rule in self._rules if rule.strikes(call, body)), None)


def expired(service: str) -> tuple[str, int]:
    """Return the code and the status that a service gives for an expired session token."""
    if service == "ec2":
        return "RequestExpired", 400
    if service in _JSON:
        return "ExpiredTokenException", 400
    return "ExpiredToken", 400 if service == "s3" else 403


def error(service: str, code: str, message: str, status: int) -> Reply:
    """Return the reply that says an error in the service's own protocol."""
    code, text = escape(code), escape(message)
    if service in _JSON:
        return status, "application/x-amz-json-1.1", json.dumps({"__type": code, "message": message}).encode()
    inner = f"<Code>{code}</Code><Message>{text}</Message>"
    if service == "s3":
        xml = f'<?xml version="1.0" encoding="UTF-8"?><Error>{inner}<RequestId>LAB</RequestId></Error>'
    elif service == "ec2":
        xml = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>lab</RequestID></Response>"
    else:
        xml = f"<ErrorResponse><Error><Type>Sender</Type>{inner}</Error><RequestId>lab</RequestId></ErrorResponse>"
    return status, "text/xml", xml.encode()
