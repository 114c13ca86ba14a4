"""What a node runs on itself after its system software changed."""

from __future__ import annotations

from gpucloud.agent.boot import joining


def test_a_command_runs_in_the_groups_that_the_login_got_meanwhile():
    assert joining(("docker", "pull", "a b"), ("docker",)) == ("sg", "docker", "-c", "docker pull 'a b'")
    assert joining(("docker", "info"), ()) == ("docker", "info")
