"""The machine's own software, looked at and changed on the machine itself."""
