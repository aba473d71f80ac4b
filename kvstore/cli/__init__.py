"""The ``kvstore`` command: one module a command. The only code that prints."""
