"""A small engine of kvstore's own: what the demo, the tests and the benchmarks serve prompts with.

``model`` is a small Llama, ``attention`` reads and writes its paged KV. ``request`` is one prompt and its answer,
``scheduler`` decides which tokens a step computes, ``engine`` runs the steps and joins them to kvstore. ``workload``
makes prompts from a real trace, ``process`` answers them in a process of its own, ``demo`` shows the whole way.
"""
