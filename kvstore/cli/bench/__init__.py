"""``kvstore bench`` and ``kvstore plan``: what this machine reaches, and what a trace would gain."""
