"""The host: what a node asks of its machine (forks, locks, memory, processors, files replaced as a whole)."""
