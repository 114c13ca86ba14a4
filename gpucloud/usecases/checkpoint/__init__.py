"""A job's checkpoints from outside the job."""
