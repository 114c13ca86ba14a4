"""What gloo and NCCL are told by variables."""

from __future__ import annotations

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where collectives listen; the agent fills in what the cloud did not say."""

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
