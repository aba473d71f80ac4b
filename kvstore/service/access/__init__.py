"""Who may call, and how much of a node each may take."""
