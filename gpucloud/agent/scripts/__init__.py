"""Keeps the directory of a script that saves by itself: puts it back, runs the script, commits what is whole."""
