"""What comes from nodes, scripts and other people: bounded, judged and cleaned before it is used or shown."""
