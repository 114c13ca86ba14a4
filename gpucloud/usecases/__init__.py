"""What a user can ask for, joined from decisions and ports."""
