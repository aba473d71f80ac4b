"""The gRPC servicers: control calls, payload streams, page events, health and reflection."""
