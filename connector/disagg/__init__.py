"""Prefill and decode on different engines: handover tickets, and waiting for pages on their way."""
