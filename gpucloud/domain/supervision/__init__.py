"""Supervision: what is seen of a job, what to do about it, and what is written down of that; all pure.

    Goal, Snapshot, Rules ──decide──▶ Action ──(done elsewhere)──▶ JobState

Values: `snapshot` (what a decision is made from) and `action` (what can be done, and on which side).
Deciding: `reconcile` (the one entry; what comes between attempts, and after the last), `during` (while one runs);
`renewal` (what goes on beside both), `capacity` (which pool), `deadline` (what a policy wants), `elastic` (fewer nodes
than all, more again, or another pool's), `budget` (another sum while it runs).
Judging a snapshot: `membership` (who takes part, who is dead, how fast it goes, when it hangs), `quarantine` (bad
nodes, bad pools), `strays` (machines of no living job), `self_driving` (machines that need nobody outside).
Writing down: `transitions` (the state after an action, and after a look).
"""
