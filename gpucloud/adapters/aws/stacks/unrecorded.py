"""Variables for a stack of which no record is left: it is only taken into a state in order to be removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ANY_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def base_as_found(region: str, found: Mapping[str, str]) -> dict[str, Any]:
    """Return variables that fit what was found of a region's base."""
    zones = sorted({to.split('"')[1] for to in found if to.startswith("aws_subnet.")})
    private = any("nat" in to or "private" in to for to in found)
    return {"region": region, "zones": zones or [f"{region}a"], "private": private, "drill_role": True, "alert": None}


def any_cluster(region: str, name: str, store: str, vpc_id: str) -> dict[str, Any]:
    """Return variables that any cluster of this name can be removed with."""
    return {
        "name": name,
        "region": region,
        "zones": [f"{region}a"],
        "node_type": "g4dn.xlarge",
        "market": "spot",
        "tags": {},
        "access": {"public_key": _ANY_KEY, "cidr": "127.0.0.1/32"},
        "store": store,
        "image": "ami-00000000000000000",
        "user_data": "",
        "efa": [0, 1, 2, 4, 8, 16, 32],
        "network": {"vpc_id": vpc_id, "subnets": {f"{region}a": "subnet-0"}, "public_address": False},
    }
