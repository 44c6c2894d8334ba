"""The router: which prefill and which decode worker a turn goes to."""
