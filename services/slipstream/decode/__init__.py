"""The decode pool: pulls the KV of prompts and samples. Loops: `README.md`."""
