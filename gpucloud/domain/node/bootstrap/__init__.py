"""Bootstrap as facts and steps: what a node must have for a job, and the commands that give it what it lacks."""
