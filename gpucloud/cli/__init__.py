"""The command line: parse, one use case, render.

`app` and `groups` are the door. Behind it: `training` (plan, up, train), `launching` (leaving a job that goes on),
`ending` (down) and `passes` (reconcile), which share `supervising`; `asking`, `watching` and the rest change nothing.
What is meant: `target`, `machines`. How it is said: `render`, `reports`, `bills`, `use`, `onlookers`.
"""
