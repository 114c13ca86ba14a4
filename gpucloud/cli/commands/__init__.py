"""One module for each command or a few that belong together."""
