"""The reference engine: a small serving engine with which the demo, the tests and the benchmarks serve prompts.

- ``engine``: runs the steps and joins them to kvstore; ``scheduler`` decides which tokens a step computes.
- ``request``: one prompt and its answer; ``batch``: what one forward pass computes.
- ``model``: a small Llama; ``attention`` reads and writes its paged KV, ``recurrence`` the states of layers without KV.
- ``kv_cache``: the memory of both.
- ``pages``: a second engine, without torch and much smaller, over the page manager.
- ``demo``: engines come and go, a node is killed, the pages stay. ``workload`` makes its prompts from a real trace,
  ``report`` says what held, ``demo_processes`` starts node and engines as processes.
- ``engine_process``: an engine as a process of its own; ``jobs``: what it is asked and answers.
"""
