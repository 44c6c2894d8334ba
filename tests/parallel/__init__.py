"""Several ranks compute what one process does: gloo processes on the CPU, spawned once."""
