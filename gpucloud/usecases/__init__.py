"""What a user can ask for, joined from decisions and ports.

Supervising a job, pass by pass (`supervise`, holding its `lease`, over the ports in `services`):

    observe ──Seen──▶ write down ──▶ decide (domain) ──Action──▶ act

Looking: `observe` with `lookout`, `witnesses`, `usage`, `history`; the look before an attempt is `inspection`.
Doing: `act` with `rent` (on the cloud), `prepare` (on nodes: `bootstrap`, `needs`, `gate`, `datasets`, `desired`,
`noderecords`) and `closing` (what an attempt leaves). Telling: `story`, `announced`, `discreet`.
Stored: `jobstore`; money: `tracker`, `budgeting`. Before it all: `start`; from any terminal: `jobs`, `doctor`, `gc`.
"""
