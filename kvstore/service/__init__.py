"""The gRPC service: messages to calls of the store, errors to statuses."""
