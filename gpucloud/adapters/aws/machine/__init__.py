"""One machine: its image, its first boot, its host key."""
