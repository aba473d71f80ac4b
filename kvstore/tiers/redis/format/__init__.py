"""Bytes and names of what lies in Redis: chunks, entries, keys, codecs. No I/O."""
