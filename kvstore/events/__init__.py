"""Events: which pages come to and leave which tier.

``ring.py`` remembers the latest changes, within a bound, as long as anybody reads them. :mod:`kvstore.store.watch`
makes of it, and of what is there now, a stream that begins anew after a gap. :mod:`kvstore.service.event_publisher`
sends that stream over ZeroMQ, in the form of ``vllm_events.py`` and to those whose keys ``curve_keys.py`` knows, and
:mod:`kvstore.service.grpc.events` over gRPC.
"""
