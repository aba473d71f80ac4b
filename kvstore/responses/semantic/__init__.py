"""Answers for prompts that are only similar to one that was answered: what is decided, without any I/O.

``reading`` takes a prompt apart (``vocabulary`` and ``verbs``: by which words), ``guards`` compare two of them,
``lexical`` is an embedding without a model, ``group`` searches stored prompts, ``decision`` says whether one is told,
by outcomes (``interval``: how sure they make), and ``beginning`` has those that it begins with.
"""
