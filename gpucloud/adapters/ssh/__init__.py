"""SSH to the nodes: the only door to paramiko on the supervisor's side."""

from gpucloud.adapters.ssh.identity import UserKeys
from gpucloud.adapters.ssh.keys import derive_key, generate_key
from gpucloud.adapters.ssh.shell import SshShell

__all__ = ["SshShell", "UserKeys", "derive_key", "generate_key"]
