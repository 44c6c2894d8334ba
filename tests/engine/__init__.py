"""A package, so that its engines end with its last body."""
