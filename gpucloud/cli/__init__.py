"""The command line: parse, one use case, render."""
