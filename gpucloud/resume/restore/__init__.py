"""Finding, reading and proving a checkpoint."""
