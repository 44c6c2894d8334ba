"""The gateway: OpenAI-compatible HTTP for outside agents, over SessionService."""
