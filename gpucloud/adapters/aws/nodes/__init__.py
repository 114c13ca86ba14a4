"""Node groups over Auto Scaling: how they are seen, sized, armed and ended."""
