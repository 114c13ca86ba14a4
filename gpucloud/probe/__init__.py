"""What the gate runs in the job's own Python: `python -m gpucloud.probe`, an order on standard input."""
