"""Clusters made and removed by Terraform alone, state in the working folder: what the embedded cloud needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gpucloud.adapters.terraform.stack import Stack
from gpucloud.domain.errors import ProvisionError
from gpucloud.ports import ClusterSpec


class TerraformProvisioner:
    """The `Provisioner` port over Terraform. A killed caller's Terraform ends by itself; the next call waits for it."""

    def __init__(
        self,
        module_dir: Path,
        work_root: Path,
        env: Mapping[str, str],
        *,
        cidr: str = "127.0.0.0/8",
        plugin_dir: Path | None = None,
        limit_s: float = 1800.0,
    ) -> None:
        """`env` is the whole environment; `cidr` is where SSH may come from; `plugin_dir` holds provider plugins."""
        self._module_dir = module_dir
        self._work_root = work_root
        self._env = dict(env)
        self._cidr = cidr
        self._plugin_dir = plugin_dir
        self._limit_s = limit_s

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  one region
        """Return the cluster's own name."""
        return name

    def image(self, region: str) -> None:
        """Return None: machines of this cloud have no image."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        """Make what costs nothing and return the node group's name; repeated, it changes only what differs."""
        stack = self._stack(spec.name)
        variables = common_variables(spec, cidr=self._cidr)
        group = stack.apply(lambda _: variables, story=story).get("group_name")
        if not isinstance(group, str):
            raise ProvisionError("terraform apply: the module has no output group_name", hint=f"see {stack.logs}")
        return group

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        """Remove everything that `ensure` made, check that nothing is left in the state, and forget the cluster."""
        self._stack(group).destroy(story=story)

    def _stack(self, name: str) -> Stack:
        return Stack(
            name=name,
            module=self._module_dir,
            root=self._work_root,
            env=self._env,
            plugin_dir=self._plugin_dir,
            limit_s=self._limit_s,
        )


def common_variables(spec: ClusterSpec, *, cidr: str) -> dict[str, object]:
    """Return the variables that every cloud's cluster module takes; none of them is a secret."""
    return {
        "name": spec.name,
        "region": spec.region,
        "zones": list(spec.zones),
        "node_type": spec.node_type,
        "market": spec.market.value,
        "tags": dict(spec.tags),
        "access": {"public_key": spec.public_key, "cidr": cidr},
        "store": spec.store,
        "unattended": spec.unattended,
    }
