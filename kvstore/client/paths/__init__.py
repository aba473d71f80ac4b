"""How pages move between a client and a store: four paths behind one contract (:mod:`kvstore.client.paths.path`)."""
