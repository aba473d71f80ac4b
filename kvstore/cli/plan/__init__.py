"""``kvstore plan``: what more of a tier would bring one node, and a simulation of a fleet of many."""
