"""The command line: parse, one use case, render.

`app` is the door: `jobs` (what is about one), `choosing` (what comes before one, or needs none) and `groups`. Behind it
`commands`: `training` (plan, up, train), `verifying` and `passes` (reconcile, budget, down, rm), which share
`supervising`; `asking`, `logs` and the rest change nothing of a job. What is meant: `target`. How it is said: `render`.
"""
