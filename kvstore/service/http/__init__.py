"""HTTP for people's tools: metrics, health, the console."""
