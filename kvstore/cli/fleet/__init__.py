"""A fleet: what its parts cost what they share, by counts; and a simulation of many nodes, for ``kvstore plan``."""
