"""The package's catalog is what its sources make, in the form that a refresh writes."""

from __future__ import annotations

from importlib import metadata

import pytest

from gpucloud.adapters.aws.prices.catalog import load, written
from tests.packaged import catalog as packaged

NOTICE = packaged.TARGET.with_suffix(".NOTICE").read_text()
of_that_moto = pytest.mark.skipif(
    f"moto {metadata.version('moto')} " not in NOTICE, reason="another moto is installed than the catalog was made from"
)


def test_the_file_is_as_it_would_be_written():
    assert packaged.TARGET.read_text() == written(load())


@of_that_moto
def test_machines_and_zones_are_those_of_the_source():
    catalog = load()
    machines = {machine.name: machine for machine in (*packaged.machines(), *packaged.OF_OLD)}
    assert catalog.machines == machines
    assert catalog.zones == dict(packaged.zones(set(machines)))


@pytest.mark.parametrize(
    ("zone_id", "own"), [("use1-az1", True), ("use1-atl2-az1", False), ("use1-wl1-bos-wlz1", False)]
)
def test_local_zones_are_no_zones_of_ours(zone_id: str, own: bool):
    assert packaged.is_own(zone_id) is own
