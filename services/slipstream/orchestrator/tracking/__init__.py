"""The run's figures in an experiment tracker beside `metrics.jsonl`, through the tracker's own library."""
