"""The sandbox executor: runs code that nobody has read, one jail a program."""
