"""The store: the primitives of a node over catalog, arena and lower tiers. No network.

:class:`kvstore.store.store.Store` says what a node can do; each concern is a module beside it, and what they share,
with the lock over it, is :class:`kvstore.store.state.StoreState`.
"""
