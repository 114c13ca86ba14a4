"""An AWS of one's own: moto behind a layer that is as strict as AWS, with capacity, interruptions and faults."""

from tests.lab.aws.calls import Call
from tests.lab.aws.lab import Lab

__all__ = ["Call", "Lab"]
