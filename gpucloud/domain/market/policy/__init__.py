"""What a job with a deadline runs on next: spot, on demand, or nothing yet."""
