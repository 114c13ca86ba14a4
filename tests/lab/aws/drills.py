"""AWS FIS: an experiment that sends spot interruptions gives the notice to the instances that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.fis.models import FISBackend
from moto.iam.models import iam_backends

from tests.lab.aws.repairs import Patches
from tests.lab.aws.world import ACCOUNT, World

ACTION = "aws:ec2:send-spot-instance-interruptions"


class _Invalid(JsonRESTError):
    def __init__(self, message: str) -> None:
        super().__init__("ValidationException", message)


def install(patches: Patches, world: World, notice: Callable[[str], None]) -> None:
    """Make experiments do what they say."""

    def create_of(old: Any) -> Any:
        def create(self: Any, **asked: Any) -> Any:
            roles = [role.arn for role in iam_backends[ACCOUNT]["aws"].roles.values()]
            if asked.get("role_arn") not in roles:
                raise _Invalid(f"The role {asked.get('role_arn')} cannot be assumed by fis.amazonaws.com")
            if not asked.get("stop_conditions"):
                raise _Invalid("stopConditions is required")
            return old(self, **asked)

        return create

    def start_of(old: Any) -> Any:
        def start(self: Any, **asked: Any) -> Any:
            experiment = old(self, **asked)
            for id_ in _named(experiment):
                if world.instance(id_).lifecycle == "spot":
                    notice(id_)
            return experiment

        return start

    patches.wrap(FISBackend, "create_experiment_template", create_of)
    patches.wrap(FISBackend, "start_experiment", start_of)


def _named(experiment: dict[str, Any]) -> list[str]:
    """Return the instances that the experiment's interruptions name."""
    targets = experiment.get("targets") or {}
    return [
        arn.rsplit("/", 1)[-1]
        for action in (experiment.get("actions") or {}).values()
        if action.get("actionId") == ACTION
        for name in (action.get("targets") or {}).values()
        for arn in targets.get(name, {}).get("resourceArns") or []
    ]
