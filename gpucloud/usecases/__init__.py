"""What a user can ask for, joined from decisions and ports.

Supervising a job, pass by pass (`supervise/session`, holding its `jobstore/lease`, over the ports in `services`):

    observe ──Seen──▶ write down ──▶ decide (domain) ──Action──▶ act

Looking: `observe` with `look` and `usage`; the look before an attempt is `inspection`. Doing: `act` with `provision`
(on the cloud), `prepare` (on nodes: `bootstrap`, `needs`), `agents` (what is written to them) and `closing` (what an
attempt leaves). Telling: `story`. What a user begins and asks: `job`, `money`, `checkpoint`, `machines`.
"""
