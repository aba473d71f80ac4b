"""The native core: what is read, copied, written for readers, joined and sent in C where a compiler was at hand, with
one release of the interpreter's lock a call. It decides nothing, and everything it does is done in Python without it.

=================== ================================================================================================
``choice.py``       which one runs, and why: what callers ask
``abi.py``          the number of the ABI that this checkout expects (made by ``make core-layout``)
``methods.h``       the table of what ``kvstore._core`` has
``layout.h``        offsets and sizes (made by ``make core-layout`` from ``kvstore/arena/format.py``)
``arena.c``         the index searched, pages copied and checked; no Python in it
``summary.c``       what is certainly nowhere; no Python in it
``writer.c``        headers, words and tags as the node writes them; no Python in it
``runs.c``          lists of runs; no Python in it
``*_methods.c``     the functions that Python calls: arguments checked, the lock released
``module.c``        the module itself
=================== ================================================================================================

A further C file needs a line in ``methods.h`` for each of its functions, and ``make core-layout`` behind it.
"""
