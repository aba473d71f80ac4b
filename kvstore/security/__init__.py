"""Security: tokens' grants, files that hold secrets, TLS contexts, the group that may use socket and arena."""
