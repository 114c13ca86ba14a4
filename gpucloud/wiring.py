"""The one composition root: job and environment in, adapters out."""
