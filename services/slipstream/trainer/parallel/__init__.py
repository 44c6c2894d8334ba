"""Several trainer ranks that compute one gradient: parameters, experts and tokens are spread, the sum is the same."""
