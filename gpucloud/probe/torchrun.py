"""torchrun with a store that the network does not reach; its arguments are torchrun's."""

from __future__ import annotations

from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from gpucloud.probe.telling import store


def main() -> None:
    """Run torchrun, which makes its store in one place."""
    static_tcp_rendezvous.TCPStore = store  # type: ignore[assignment, attr-defined]
    torchrun.main()


if __name__ == "__main__":
    main()
