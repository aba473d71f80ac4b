"""The connector: what an engine loads from kvstore instead of computing it, and what it stores there.

::

    scheduler half (scheduler.py)    looks up, and decides what to load and to store; no tensors, no waiting
        │ StepPlan (plan.py)         one a step, from the engine's scheduler process to its workers
        ▼
    worker half (worker.py)          carries it out in the background (transfer_queue.py), through gpu/ and the client
        │ get_finished()             what ended since the last step, and which blocks were not filled
        ▼
    the scheduler half again

Both halves know no engine. ``blocks/`` is a block manager like vLLM's, ``reference/`` a small engine of our own,
``disagg/`` is prefill and decode on different engines, ``proxy/`` the endpoint in front of these. ``engine/`` is the
scheduler side of an engine like vLLM: it reads such an engine's objects and imports none. Only ``vllm.py``, the
adapter, and ``vllm_plugin.py``, by which vLLM finds it, import vLLM. A new engine is an adapter beside ``vllm.py``: it
declares its KV tensors (``gpu/layout.py``), and calls the halves in the order that their classes give.

SGLang's HiCache has halves of its own, and asks for pages by its own keys: ``hicache/`` answers, without SGLang, which
only ``sglang.py`` imports.
"""

if __name__ != "kvstore.connector":  # under two names every module would be there twice, with two states
    raise ImportError("connector is kvstore.connector: import it by that name")
