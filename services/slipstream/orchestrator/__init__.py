"""The orchestrator: sequencer of a run."""
