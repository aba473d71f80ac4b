"""Who may do what: tenants' grants, secrets in files, TLS contexts, the group that may use the socket."""
