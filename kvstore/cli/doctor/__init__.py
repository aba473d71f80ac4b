"""The checks of ``kvstore doctor``, and why a prompt missed. Each check returns verdicts, and changes nothing.

::

    command.py     the command: which checks are made, and how verdicts are printed
    verdict.py     what a check found: good, to improve, or broken, and what to do
    machine.py     shared memory, limits, NUMA
    node.py        the node: its socket, users, version, clock, hashes, counters
    tiers.py       disk and Redis
    objects.py     object storage
    engine.py      vLLM's flags, its process, its packages
    hash_probe.py  the hashes that another Python computes
    why.py         the first missing block of a prompt, and the field of its key that differs
"""
