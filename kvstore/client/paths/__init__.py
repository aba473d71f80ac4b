"""The ways for pages to move between a client and a store, behind one contract (:mod:`kvstore.client.paths.path`)."""
