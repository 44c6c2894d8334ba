"""Weights on their way from trainer to engines: manifest, logical checksum, transports."""
