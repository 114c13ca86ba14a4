"""Starts mpirun over the nodes of an attempt, without SSH between them.

mpirun reaches other machines through a program of the user's choice (Open MPI's `plm_rsh_agent`). Ours hands its
command to the launcher of that node, which is connected to the one of node 0 already: so each node's ranks are
processes of its own agent, nothing is added to anybody's authorized_keys, and no inbound SSH is needed between nodes.

    node 0: agent ─ head ─ mpirun ─ remote (one a node) ──unix socket── head
    node n: agent ─ member ─ orted ─ ranks                             member ══ TCP, signed ══ head

The listening port is the attempt's own and is closed again when all members are there.
"""
