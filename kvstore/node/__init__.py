"""A node: its store, maintenance and servers, built in order and stopped in reverse."""
