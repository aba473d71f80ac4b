"""Prefill and decode on different engines: the handover of a prompt's pages from one to the other, by a ticket."""
