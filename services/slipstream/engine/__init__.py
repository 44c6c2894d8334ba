"""What an inference engine is (`base.py`), block hashes, and the engines themselves."""
