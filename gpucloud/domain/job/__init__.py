"""The job: what the user asked for, and how it stands."""
