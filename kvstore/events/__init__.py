"""Which pages are in which tier, told as it changes.

``ring.py`` remembers the latest changes, within a bound, as long as anybody reads them. ``following.py`` makes of it
and of what is there now a stream that a reader can trust. ``publisher.py`` sends that stream over ZeroMQ, in the form
of ``block_events.py`` and to those whose keys ``keys.py`` knows, and :mod:`kvstore.service.grpc.events` over gRPC.
"""
