"""Emulated clouds for tests."""
