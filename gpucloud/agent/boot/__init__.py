"""The node makes itself fit: by its record, with the supervisor's own steps."""
