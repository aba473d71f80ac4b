"""A small engine of kvstore's own: what the demo, the tests and the benchmarks serve prompts with.

``model`` is a small Llama, for a ``batch`` of sequences at a time. ``attention`` reads and writes its paged KV,
``recurrence`` the states of layers that have no KV, and ``kv_cache`` is the memory of both. ``request`` is one prompt
and its answer, ``scheduler`` decides which tokens a step computes, ``engine`` runs the steps and joins them to kvstore.
``workload`` makes prompts from a real trace, ``process`` answers them in a process of its own, ``demo`` shows the whole
way.
"""
