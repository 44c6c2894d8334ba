"""The runner: environments, agent loops and the inference client."""
