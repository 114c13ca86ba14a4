"""What a job costs, and what it is going to cost."""
