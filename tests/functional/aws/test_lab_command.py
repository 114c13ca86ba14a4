"""The emulated AWS from the command line: what it hands to the command, what it says of it afterwards."""

from __future__ import annotations

import subprocess
import sys

COMMAND = """
import boto3, os, sys
assert os.environ["AWS_REGION"] == "us-east-1"
boto3.client("iam").create_role(RoleName="left", AssumeRolePolicyDocument="{}")
print(sys.stdin.read(), end="")
sys.exit(7)
"""


def test_the_commands_answer_and_exit_code_are_its_own_and_what_it_left_is_named() -> None:
    lab = [sys.executable, "-m", "tests.lab.aws", "--no-machines", "--capacity", "g4dn.xlarge/us-east-1a/spot=0"]
    done = subprocess.run(
        [*lab, "--", sys.executable, "-c", COMMAND], input="typed", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (7, "typed")
    said = done.stderr.splitlines()
    assert said[said.index("lab: of that is new:") + 1] == "lab:   role left"
    assert said[said.index("lab: born without owner tags:") + 1] == "lab:   CreateRole left"


def test_a_fault_of_the_command_line_strikes() -> None:
    lab = [sys.executable, "-m", "tests.lab.aws", "--no-machines"]
    fault = '{"action": "CreateRole", "code": "AccessDenied", "status": 403}'
    done = subprocess.run(
        [*lab, "--fault", fault, "--", sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "(AccessDenied) when calling the CreateRole operation" in done.stderr
    assert "role left" not in done.stderr
