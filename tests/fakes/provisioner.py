"""A provisioner that keeps clusters in memory; held to the port's contract by tests/contract/test_provisioner.py."""

from __future__ import annotations

from collections.abc import Callable

from gpucloud.domain.errors import ProvisionError
from gpucloud.ports import ClusterSpec


class FakeProvisioner:
    """Clusters by name; while `refusal` is set every call that would change something fails with it."""

    def __init__(self) -> None:
        self.clusters: dict[str, ClusterSpec] = {}
        self.refusal: str | None = None

    def group(self, name: str, region: str) -> str:
        """Return the cluster's own name."""
        return name

    def image(self, region: str) -> None:
        """Return None: machines of this cloud have no image."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        if self.clusters.get(spec.name) != spec:
            self._check()
            story(f"made {spec.name}")
            self.clusters[spec.name] = spec
        return spec.name

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        if group in self.clusters:
            self._check()
            story(f"removed {group}")
            del self.clusters[group]

    def _check(self) -> None:
        if self.refusal is not None:
            raise ProvisionError(self.refusal, hint="ask the cloud")
