"""How the node and its GPUs are used: sampled, kept, shown to Prometheus, and judged."""
