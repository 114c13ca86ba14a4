"""Who we are on AWS: identity, quotas, and the rights that are needed."""
