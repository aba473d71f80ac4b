"""Pages over bulk connections: framed TCP (or TLS), for nodes on other hosts."""
