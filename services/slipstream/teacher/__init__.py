"""Teacher workers: what a frozen model says of tokens that the policy sampled."""
