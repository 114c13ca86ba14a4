"""A bare moto server, and the role that it gives to a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.request import Request, urlopen

import boto3
from moto.server import ThreadedMotoServer

from tests.lab.aws.machines import Role

_KNOWN = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}


@contextlib.contextmanager
def bare_aws() -> Iterator[str]:
    """Yield the URL of an empty AWS."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        # What it holds is the process's, not the server's.
        with urlopen(Request(f"{url}/moto-api/reset", method="POST"), timeout=10):
            yield url
    finally:
        server.stop()


def instance_role(url: str, instance_id: str, name: str = "gpucloud-digits") -> Role:
    """Return a new role with the keys of the session that EC2 opens for a machine: it is named by the machine's id."""
    iam = boto3.client("iam", endpoint_url=url, **_KNOWN)
    made = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]
    sts = boto3.client("sts", endpoint_url=url, **_KNOWN)
    keys = sts.assume_role(RoleArn=made["Arn"], RoleSessionName=instance_id)["Credentials"]
    return Role(
        name=name,
        role_id=made["RoleId"],
        arn=made["Arn"],
        access_key=keys["AccessKeyId"],
        secret_key=keys["SecretAccessKey"],
        token=keys["SessionToken"],
    )
