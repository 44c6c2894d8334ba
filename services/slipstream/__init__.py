"""Asynchronous reinforcement learning of language models, as a set of small services."""
