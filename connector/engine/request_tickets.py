"""Tickets of an engine's requests: which of them take one, or are answered with one, between prefill and decode."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvstore.connector.disagg.handover import Handover, Prompt
from kvstore.connector.engine.hints import SHARED
from kvstore.connector.engine.metrics import Counts, ticket_counts
from kvstore.connector.engine.request_hashes import RequestHashes
from kvstore.connector.engine.request_state import RequestState

_DONE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Ends of a request whose prompt was answered, as vLLM calls them."""

_logger = logging.getLogger("kvstore.connector")


class RequestTickets:
    """Belongs to the scheduler's thread. Without a ``handover`` this instance has no key, and neither gives nor takes
    tickets."""

    def __init__(self, handover: Handover | None, hashes: RequestHashes) -> None:
        self._handover = handover
        self._hashes = hashes
        self._said: set[str] = set()

    def take(self, state: RequestState, hashes_a_block: Sequence[int]) -> None:
        """A request has come; a prefill instance may have computed its prompt."""
        request = state.request
        state.hands_over = _asks(request, "do_remote_decode")
        if not _asks(request, "do_remote_prefill") or state.chain is None or not state.may_load:
            return
        if self._hashes.private:
            return  # nothing that another instance has stored is found any more
        if self._handover is None:
            if "ticket" in request.kv_transfer_params:  # else it is another connector's to hand over
                self._say_once("a request came with a ticket, and this instance has no ticket_key_file: it computes")
        elif request.kv_transfer_params.get(SHARED) and state.shared_prefix is None:
            self._say_once("a request came with a ticket and a shared prefix that this instance lacks: it computes")
        elif not request.skip_reading_prefix_cache:
            prompt = self._prompt(state, hashes_a_block)
            self._handover.take(request.request_id, request.kv_transfer_params, prompt)

    def give(
        self, state: RequestState, hashes_a_block: Sequence[int], block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """What a request is answered with, at its end, that another instance goes on with."""
        request = state.request
        if not state.hands_over or state.chain is None or not state.may_store or self._hashes.private:
            return None
        if self._handover is None:
            self._say_once("a request asks for a ticket, and this instance has no ticket_key_file: it gets none")
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if request.status.name not in _DONE or computed < request.num_prompt_tokens:
            return None
        params = self._handover.give(request.request_id, self._prompt(state, hashes_a_block), block_ids)
        if params is not None and state.shared_prefix is not None:
            params[SHARED] = state.hints.shared_prefix  # or decode would look for other pages
        return params

    def counts(self) -> Counts:
        """Tickets since the start."""
        return ticket_counts(self._handover.statistics()) if self._handover is not None else {}

    def _prompt(self, state: RequestState, hashes_a_block: Sequence[int]) -> Prompt:
        assert state.chain is not None
        state.hashes(hashes_a_block)  # the chain has all blocks now
        request = state.request
        tokens = request.all_token_ids[: request.num_prompt_tokens]
        return Prompt(tokens, state.chain, self._hashes.block_size, state.state_tokens)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning(what)


def _asks(request: Any, key: str) -> bool:
    """Whether a request's ``kv_transfer_params`` say so."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get(key))
