"""Model definitions and state-dict adapters: one folder per architecture, single-device code."""
