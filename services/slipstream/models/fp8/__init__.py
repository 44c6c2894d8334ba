"""Training in FP8 with a scale for each block, as DeepSeek-V3 was trained."""
