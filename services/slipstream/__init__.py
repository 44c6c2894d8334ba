"""Asynchronous reinforcement learning of language models, as a set of small services."""

import sys

if sys.argv[:1] == ["-m"] and sys.path and not sys.flags.safe_path:
    # Each service is a `python -m`, which puts the current folder first: a third party's modules are found there, and
    # are to hide none of those that are installed.
    sys.path.append(sys.path.pop(0))
