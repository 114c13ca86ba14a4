"""What the emulated AWS knows beyond moto: its clocks and switches, and moto's stores by name."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

from moto.autoscaling.models import autoscaling_backends
from moto.core.base_backend import BackendDict
from moto.core.model_instances import reset_model_data
from moto.ec2 import ec2_backends

ACCOUNT = "123456789012"
REGION = "us-east-1"
# Look like keys, so that a test can look for them where no key may be; are none.
ACCESS_KEY = "AKIALABLABLABLAB0000"
SECRET_KEY = "LabSecretLabSecretLabSecretLabSecret0000"


class Machine(Protocol):
    """Where a machine listens."""

    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...


class Machines(Protocol):
    """Real machines behind the instances; every call but `launch` and `end` returns at once."""

    port: int

    def launch(self, id: str, **said: Any) -> Machine: ...  # noqa: A002
    def notice(self, id: str, at: datetime) -> None: ...  # noqa: A002
    def end(self, id: str) -> None: ...  # noqa: A002
    def freeze(self, id: str) -> None: ...  # noqa: A002
    def answers(self, id: str) -> bool: ...  # noqa: A002
    def powered_off(self) -> frozenset[str]: ...
    def console(self, id: str) -> str: ...  # noqa: A002
    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Death:
    """How the next instances of a pool die before they run."""

    code: str
    message: str
    times: int


@dataclass(slots=True, kw_only=True)
class World:
    """Shared by the front, the repairs and the pump; everything under `lock`."""

    machines: Machines | None = None
    notice_s: float = 120.0
    boot_s: float = 0.2
    end_s: float = 0.2
    retry_s: float = 2.0  # a group that was refused asks again after this; AWS takes longer and longer
    shutdown_lag_s: float = 0.0  # AWS runs scheduled actions up to two minutes late
    stale_s: float = 0.0
    stale_random: random.Random | None = None  # each listing lags by a time of its own, up to stale_s
    has_launch_instances: bool = True
    launch_error: tuple[str, str] | None = None  # code and message that every LaunchInstances tells in its answer
    profile_s: float = 0.0  # so long after its birth a role's profile is not known to EC2
    prices: dict[str, list[tuple[datetime, str]]] = field(default_factory=dict)  # see Lab.prices
    capacity: dict[str, int] = field(default_factory=dict)
    quotas: dict[str, float] = field(default_factory=dict)
    deaths: dict[str, Death] = field(default_factory=dict)
    image_user: str = "ubuntu"
    node_env: dict[str, str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    kick: threading.Event = field(default_factory=threading.Event)
    untagged: list[str] = field(default_factory=list)

    def instances(self) -> Iterator[Any]:
        """Yield every instance of every region, ended ones too."""
        for backend in list(ec2_backends[ACCOUNT].values()):
            for reservation in list(backend.reservations.values()):
                yield from list(reservation.instances)

    def instance(self, id_: str) -> Any:
        """Return one instance. KeyError: no such instance."""
        for instance in self.instances():
            if instance.id == id_:
                return instance
        raise KeyError(id_)

    def scaling(self) -> Iterator[Any]:
        """Yield Auto Scaling's state of every region."""
        yield from list(autoscaling_backends[ACCOUNT].values())

    def groups(self) -> Iterator[Any]:
        """Yield every Auto Scaling group of every region."""
        for backend in list(autoscaling_backends[ACCOUNT].values()):
            yield from list(backend.autoscaling_groups.values())


def forget() -> None:
    """Drop everything that moto holds. moto's own reset keeps EC2's state when Auto Scaling's is reset after it."""
    for store in list(BackendDict._instances):
        if store.service_name == "s3":
            for backends in store.values():
                backends.reset()  # closes the files that hold the objects
        store.clear()
    BackendDict._instances.clear()
    reset_model_data()


def now() -> datetime:
    """Return the time, aware."""
    return datetime.now(timezone.utc)


def market(*, spot: bool) -> str:
    """Return the last part of a pool's key."""
    return "spot" if spot else "on_demand"
