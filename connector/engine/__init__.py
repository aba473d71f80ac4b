"""The scheduler side of an engine like vLLM: hits, admission of loads, block hashes. Its objects are only read."""
