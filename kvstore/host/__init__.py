"""The machine below a node: forks, locks, memory, processors, files that are replaced as a whole."""
