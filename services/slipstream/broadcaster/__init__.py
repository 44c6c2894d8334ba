"""The broadcaster: takes versions from the trainer, keeps them on disk, serves them to workers.

Loops, what each takes, waits for and is unblocked by: `README.md`.
"""
