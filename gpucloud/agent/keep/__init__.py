"""Keeps the checkpoint directory of a script that saves by itself: puts it back, starts the script, commits what is whole."""
