"""The client: stores, loads and looks up pages at a node, or in a store inside this process.

``connect(url)`` → ``Client`` → ``Namespace`` → ``Handle`` → ``transfers`` → ``Path``:

* ``connect.py`` makes a ``Client`` (``client.py``: one node) of a URL (``url.py``) and of files for TLS and tokens
  (``credentials.py``); ``traced.py`` has the one whose calls are OpenTelemetry spans.
* ``namespace.py``: pages of one layout, which callers store and load by their block hashes.
* ``handle.py``: what is known of a namespace at the node, found out again when the node was restarted.
* ``transfers.py`` cuts stores and loads of any number of pages into batches; ``lookups.py`` looks pages up.
* ``paths/``: how pages move, and the calls that move none, behind the contracts in ``paths/path.py``. Four paths:

  =============== ============================= ==================================================================
  ``shm/``        copies, in the mapped arena   ``unix://``
  ``bulk/``       frames over TCP or TLS        ``kv://``, ``kvs://``
  ``grpc.py``     raw messages of gRPC streams  the same where no bulk connection can be made; ``unix://`` where the
                                                arena can't be mapped
  ``embedded.py`` copies, inside this process   ``embedded://``
  =============== ============================= ==================================================================
"""
