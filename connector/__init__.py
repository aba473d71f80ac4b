"""The engine side: what to load and store (scheduler half), and doing it (worker half). Imports no engine."""
