"""vLLM behind the engine protocol. Only `config.py` can be imported where vLLM is not installed."""
