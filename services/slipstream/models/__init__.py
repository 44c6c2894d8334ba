"""The architectures that are trained and served, and what each of them gives (`base.py`)."""
