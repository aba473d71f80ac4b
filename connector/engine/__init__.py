"""The adapter for an engine whose scheduler works like vLLM's. Imports no engine: its objects are read."""
