"""Access control: who may call, and how many connections, calls, messages and bytes each caller may have at once."""
