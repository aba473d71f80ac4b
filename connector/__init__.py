"""The engine side: what to load and store (scheduler half), and doing it (worker half). Imports no engine."""

if __name__ != "kvstore.connector":  # under two names every module would be there twice, with two states
    raise ImportError("connector is kvstore.connector: import it by that name")
