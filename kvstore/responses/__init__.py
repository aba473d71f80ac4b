"""Answers that were given before, for equal requests: an exact cache of completions and chat completions.

A request that determines its answer is looked up by all of its fields and by who asks; if an equal one was answered,
that answer is told again, as one body or as server-sent events. Off unless somebody opens it::

    cache = ResponseCache(open_store("responses.sqlite", Limits()), Sealing(key), ttl=3600)
    answered = await cache.answer("/v1/chat/completions", fields, ask_model, caller=Caller(api_key), run="model-7")

One file, one part: ``request`` (which requests are equal), ``answer`` (whether one is finished, and how it is told
again), ``policy`` (who shares with whom, and ``Cache-Control``), ``store`` (what a store does), ``sqlite`` and
``redis`` (two of them), ``open`` (the one that is named), ``sealing`` (how entries are encrypted and named), ``kept``
(a question, and what is read for it), ``lookup_threads`` (who reads, and until when), ``flight`` (equal requests at
once), ``metrics``, and ``cache``, which ties them together. Of similar prompts: ``semantic`` (what decides, without
I/O), ``similar`` (which answer is told, and what is learnt), ``shadow_gate`` (whether any is), ``similar_hits`` (before
and behind a request).
"""

from kvstore.responses.cache import Answered, ResponseCache
from kvstore.responses.open import open_store
from kvstore.responses.policy import Caller
from kvstore.responses.sealing import Sealing
from kvstore.responses.similar import Similar
from kvstore.responses.store import Limits

__all__ = ["ResponseCache", "Answered", "Caller", "Limits", "Sealing", "Similar", "open_store"]
