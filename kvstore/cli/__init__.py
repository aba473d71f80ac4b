"""The ``kvstore`` command: a module for each group of commands, and the only code that prints."""
