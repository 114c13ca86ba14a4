"""The bootstrap's step for a job's container image: when it is needed, and what the node is told."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json

IMAGE_HINT = "correct `image:`, or name the secret with its registry's user:password in `container: {login: …}`"


def image_reason(facts: Facts, wanted: Wanted) -> str | None:
    """Return why the image must be pulled, None when it is there or none is wanted."""
    if wanted.image is None:
        return None
    return None if facts.image and facts.image.reference == wanted.image.reference else "the image is not here"


def image_order(wanted: Wanted) -> bytes:
    """Return what the node is told; it may hold the registry's password, so it travels on standard input."""
    assert wanted.image is not None  # noqa: S101  the step is needed only with one
    return to_json(wanted.image).encode()
