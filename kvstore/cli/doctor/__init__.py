"""What ``kvstore doctor`` looks at. Each module answers with verdicts, and changes nothing.

::

    verdict.py    one finding: what was looked at, how it is, what to do
    machine.py    shared memory, limits, NUMA
    node.py       the node: its socket, users, version, clock, hashes, counters
    tiers.py      disk and Redis
    engine.py     vLLM's flags, its process, its packages
    prompt.py     why a prompt missed: a prompt as it is asked for
    why.py        and the first block, and the field of the key, in which it differs
"""
