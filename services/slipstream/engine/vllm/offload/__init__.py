"""KV that leaves the engine's block pool and can come back: to host memory, to disk, to a store of the cluster."""
