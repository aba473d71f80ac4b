"""The wire between clients and a node, as a client in any language has to speak it.

Three protocols carry the protobuf messages of proto/kvstore/v1/:

* gRPC: every call, and pages as raw messages of two streams. :mod:`kvstore.wire.messages` says how hashes, tokens and
  errors are coded. A client needs no more than this.
* Bulk connections, described here: pages over TCP (TLS where gRPC has it), straight from and into their place. gRPC's
  messages cost a copy on each side and twice the processor time.
* Local connections (:mod:`kvstore.wire.local`): the calls around copies, over a Unix socket in the arena's folder.

The last two are made of *frames*: a header of 32 bytes (:mod:`kvstore.wire.frame` has its layout), a message, and the
pages of a payload. A payload is for each page its bytes and behind them their xxh3_64 (seed 0; 8 bytes, little-endian).

A bulk connection begins with one call, ``kvstore.v1.Bulk/Open``: the reply has the port, and a token that is good for
one connection, for ``expires_ms``. Requests then come one after the other and are answered in their order; a client may
send the next one before it has the answer::

    client                                      node
    HELLO    the token                      ->
                                            <-  READY     empty: the connection is good; or FAILED: it is refused
    LOAD     LoadPages                      ->
                                            <-  RUN       PageRun without checksums, payload: the leading pages
    RESERVE  PrepareStoreRequest            ->
                                            <-  RESERVED  PrepareStoreReply
    PUT      StorePages without checksums,
             payload: the reserved pages    ->
                                            <-  STORED    StoreCounts
    PUT      StorePages with a request,
             payload: all pages of it       ->
                                            <-  STORED    StoreCounts, of all of them
    any of these                            ->
                                            <-  FAILED    the error; the connection stays good

* The ``milliseconds`` of a request say how long the node may work on it, 60,000 at most. Those of an answer are the
  request's number (:attr:`kvstore.wire.frame.Header.number`), so none is taken for another's; those of READY are 1.
* FAILED carries UTF-8: the name of a class in :mod:`kvstore.errors`, a newline, and the text.
* A page is good only when the checksum behind it is its own: the receiver makes it from the bytes that it has just
  received, while they are in its cache. Pages of a PUT are published together, when all are right.
* Whoever receives something else than a frame closes the connection. A client whose connection broke behind a PUT asks
  ``Bulk/Settle`` what became of it.
"""
