"""The service: a node's calls, from connections to the store and back.

A gRPC call's way: a listener (``kvstore.node.listeners``) accepts the connection, the gate in ``access`` checks token,
right, namespace and limits, a servicer in ``grpc`` answers it, and ``page_calls`` turns the messages of stores and
loads into calls of the store. Errors of the store become statuses in ``calls``; ``call_times`` measures each call.

Payloads come in by ``incoming``, whose results ``receipts`` keeps for clients that lost the answer: as gRPC streams
(``grpc/pages.py``), or as frames over TCP after a token from gRPC (``sockets/bulk.py``). Clients that map the arena
copy by themselves, and make the calls around their copies over a Unix socket in its folder (``sockets/local.py``).
Page events go out as gRPC streams (``grpc/events.py``) and over ZeroMQ (``event_publisher``). ``http`` is for people
and Prometheus. After a fork, ``listening_sockets`` closes the child's copies of all these sockets.
"""
