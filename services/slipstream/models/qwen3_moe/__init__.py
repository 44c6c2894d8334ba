"""Qwen3-MoE from torchtitan's module tree, with our attention, router and expert nodes."""
