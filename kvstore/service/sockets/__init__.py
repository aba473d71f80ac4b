"""Calls that come as frames: bulk connections over TCP, and the socket in the arena's folder."""
