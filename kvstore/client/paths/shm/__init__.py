"""Pages through the node's arena, mapped into the client's process."""
