"""A machine's own software: driver, fabric, containers; what a job wants of it, and how it gets there."""
