"""Embeddings that are models of the operator's: behind an API (``api``), or in a folder (``folder``). They block.

The one that needs no model is :mod:`kvstore.responses.semantic.lexical`. Whatever fails here raises
:class:`~kvstore.responses.embedding.failure.EmbeddingError`, and the request is computed.
"""
