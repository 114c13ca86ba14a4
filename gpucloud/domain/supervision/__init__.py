"""Supervision: what is seen of a job, what to do about it, and what is written down of that; all pure.

    Goal, Seen, Rules ──decide──▶ Action ──(done elsewhere)──▶ JobState

Values: `seen` (what a decision is made from) and `action` (what can be done, and on which side).
Deciding: `reconcile` (the one entry, in the order of what comes first), then `during` an attempt or `between` two;
`upkeep` (what goes on beside both), `capacity` (which pool), `launched` (when nobody outside is needed any more).
Judging what is seen: `membership` (who takes part, who answers), `belief` (when silence is death), `hang`, `storm`
(interruptions too thick), `quarantine` (bad nodes, bad pools), `elastic` (fewer nodes than all, and more again).
Money: `prepaid` (the hard wall), `budget` (another sum while it runs).
Writing down: `books` (the state after an action, and after a look).
"""
