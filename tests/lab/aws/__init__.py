"""An AWS of one's own: moto behind a layer that is as strict as AWS, with capacity, interruptions and faults.

    with Lab(folder) as lab:  # `machines=` for nodes that answer over SSH
        lab.capacity["g4dn.xlarge/us-east-1a/spot"] = 1
        lab.faults.add("LaunchInstances", when="after")  # applied, the reply is lost
        subprocess.run(["gpucloud", "up"], env=lab.env)
        assert lab.inventory() == before

or from the command line: python -m tests.lab.aws --help. The docstring of each module says where it stands in for moto.
"""

from tests.lab.aws.calls import Call
from tests.lab.aws.lab import Lab

__all__ = ["Call", "Lab"]
