"""Supervised fine-tuning on conversations: `slipstream sft` with a `[data]` section."""
