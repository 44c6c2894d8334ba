"""The trainer: supervised warm-up, then one optimizer step on each sealed plan, each published as a version."""
