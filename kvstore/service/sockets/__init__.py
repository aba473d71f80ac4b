"""Servers of framed connections: bulk connections over TCP, and local ones over a socket in the arena's folder."""
