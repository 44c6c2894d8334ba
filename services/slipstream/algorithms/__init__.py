"""Pure functions and state machines: advantages, losses, packing, mismatch, staleness. No I/O, no config objects."""
