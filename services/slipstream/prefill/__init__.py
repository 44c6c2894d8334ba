"""The prefill pool: computes prompts and hands their KV over. Loops: `README.md`."""
