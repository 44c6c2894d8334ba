"""The embedded engine: the trainer's own model with paged attention, continuous batching and in-flight updates."""
