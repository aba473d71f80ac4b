"""Redis servers and their connections: addresses, protocol, scripts, threads. Knows nothing of pages."""
