"""A node: store, maintenance and service, built in order and stopped in the reverse of it."""
