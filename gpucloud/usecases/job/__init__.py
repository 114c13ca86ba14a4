"""What a user does with a job: starts it, supervises it, asks about it, changes its budget."""
