"""The scheduler side of an engine like vLLM: hits, admission of loads, names of blocks. Its objects are only read."""
