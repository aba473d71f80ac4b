"""The client: one public interface over three ways for pages to move.

* ``shared``: the client maps the node's arena and copies from and to it (same host).
* ``stream``: pages travel as raw gRPC messages (another host, or a container that can't see the arena).
* ``embedded``: the store runs in this process.
"""
