"""Bulk connections: pages over plain TCP (or TLS), straight from and into their place.

gRPC's messages cost a copy on each side and twice the processor time. A bulk connection is opened with a one-time token
that the gRPC channel gave (``kvstore.v1.Bulk/Open``) and carries requests one after the other, answered in their
order; a client may send the next one before it has the answer. Everything is a *frame*: a header of 32 bytes
(:mod:`kvstore.wire.frame`), a message, and the pages of its payload. Header and message have a checksum, and each page
has one behind it::

    client                                      node
    HELLO    the token                      ->
                                            <-  READY     (the connection is good)
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
                                            <-  FAILED    name and text of the error; the connection stays good

An answer says which request it answers (:attr:`kvstore.wire.frame.Header.number`), so none is taken for another's.
The messages are those of gRPC (proto/kvstore/v1/cache.proto). A page is good only when the checksum behind it is its
own: the receiver makes it from the bytes that it has just received, while they are in its cache. Pages of a PUT are
published together, when all are right. Whoever receives something else than a frame closes the connection.
"""
