"""Low-rank adapters on any architecture: only they are trained, and they are small enough to publish at every step."""
