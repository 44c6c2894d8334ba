"""The `slipstream` command: starts a run's services on this machine, watches them, shows and reports."""
