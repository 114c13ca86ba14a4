"""Variables for a stack of which no record is left: it is only taken into a state in order to be removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A launch template is taken in under its layout's key, so every layout that may have been made stands here.
_ANY_LAYOUT = [
    {"interfaces": 0, "cards": 1},
    *({"interfaces": n, "cards": n + plain} for n in (1, 2, 4, 8, 16, 32, 64) for plain in (0, 1)),
]
_ANY_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def base_as_found(region: str, found: Mapping[str, str], boundary: str | None) -> dict[str, Any]:
    """Return variables that fit what was found of a region's base, its role under that boundary."""
    zones = sorted({to.split('"')[1] for to in found if to.startswith("aws_subnet.")})
    private = any("nat" in to or "private" in to for to in found)
    return {
        "region": region,
        "zones": zones or [f"{region}a"],
        "private": private,
        "drill_role": True,
        "permissions_boundary": boundary,
        "alert": None,
    }


def any_cluster(region: str, name: str, store: str, vpc_id: str, boundary: str | None) -> dict[str, Any]:
    """Return variables that any cluster of this name can be removed with, its role under that boundary."""
    return {
        "name": name,
        "region": region,
        "zones": [f"{region}a"],
        "node_type": "g4dn.xlarge",
        "market": "spot",
        "tags": {},
        "access": {"public_key": _ANY_KEY, "cidr": "127.0.0.1/32"},
        "store": store,
        "machine": {"permissions_boundary": boundary},
        "image": "ami-00000000000000000",
        "user_data": "",
        "efa": _ANY_LAYOUT,
        "network": {"vpc_id": vpc_id, "subnets": {f"{region}a": "subnet-0"}, "public_address": False},
    }
