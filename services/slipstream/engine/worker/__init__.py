"""What prefill and decode workers share: updates, admission, load reports, routes, timeline, the process itself."""
