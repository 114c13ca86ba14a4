"""What gloo, NCCL and OpenMP are told by variables."""

from __future__ import annotations


def on_interface(name: str) -> dict[str, str]:
    """Return what makes collectives use this network interface and no other.

    NCCL takes a bare name for the beginning of names: `eth1` would be `eth10` too, and `bond0` a VLAN on it that the
    peers cannot reach; `=` in front asks for exactly that one (NCCL's guide, "NCCL_SOCKET_IFNAME"). Gloo knows no `=`.
    """
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


# A rank that waits so long in a collective has lost another one; the supervisor's own watch is quicker, so this is for
# a supervisor that is away. PyTorch's default is 480 s (8 min; docs, "ProcessGroupNCCL Environment Variables").
_HEARTBEAT_S = 300


def gpu_defaults(attempt_folder: str, *, efa: bool) -> dict[str, str]:
    """Return what NCCL is told on a node with GPUs; the launch's own variables win.

    NCCL writes warnings to a file of its own per process (`%h` host, `%p` process; NCCL's guide, "NCCL_DEBUG_FILE"),
    and a collective that never ends leaves its story (PyTorch, "Flight Recorder"). With EFA, AWS's guide "Get started
    with EFA and NCCL" names the provider and RDMA; forking needs FI_EFA_FORK_SAFE where the kernel is older than 5.13.
    """
    nccl = {
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": f"{attempt_folder}/nccl-%h-%p.log",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a collective that failed ends its process, and so the attempt
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(_HEARTBEAT_S),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{attempt_folder}/nccl-trace-",
    }
    fabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    return {**nccl, **(fabric if efa else {})}


def threads(processes: int, cpus: int) -> dict[str, str]:
    """Return what keeps the `processes` of a launch from starting a thread for every one of the same `cpus` each.

    Nothing for a process that has them to itself: torchrun too sets the variable for several workers only, but to 1.
    """
    return {"OMP_NUM_THREADS": str(max(1, cpus // processes))} if processes else {}
