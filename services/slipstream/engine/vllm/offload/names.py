"""Names by which our engine and the offloading side of vLLM's scheduler reach each other."""

SALT = "slipstream_salt"
"""Of a request's `kv_transfer_params`: the salt in plain, which vLLM only has hashed."""

FIGURES = "slipstream_offload"
"""Among what vLLM lets connectors tell: the fields of `OffloadLoad`."""
