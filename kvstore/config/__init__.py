"""Settings of a node: declared once, read from flags, environment and file, and validated."""
