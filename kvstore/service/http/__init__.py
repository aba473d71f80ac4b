"""HTTP for people and their tools: metrics for Prometheus, a health probe, the console in a browser."""
