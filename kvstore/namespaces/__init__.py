"""What a node knows of namespaces and tenants: their register, quotas, pins and use. No arena, no lock."""
