"""The state of one request of an engine: its block hashes, what is stored of it, and what its load saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.connector.blocks.extra_keys import SharedPrefix
from kvstore.connector.blocks.hashing import BlockHashChain
from kvstore.connector.engine.hints import Hints


@dataclass(slots=True)
class RequestState:
    """A request that the engine has told of and that has not finished."""

    request: Any
    """The engine's object: it grows and changes."""
    chain: BlockHashChain | None
    """None: nothing of it is stored or loaded."""
    num_groups: int
    num_preemptions: int
    may_store: bool = True
    may_load: bool = True
    hints: Hints = field(default_factory=Hints)
    shared_prefix: SharedPrefix | None = None
    """With which its prompt begins, and which it shares."""
    hands_over: bool = False
    """Another instance goes on with it."""
    num_local: int = 0
    """Tokens that the engine had itself when it last asked."""
    is_new: bool = False
    """It has got blocks, and no step has computed with them: another connector may have loaded into them."""
    looked_up: bool = False
    """What kvstore lacks of it was told to those who listen to block events."""
    declined: bool = False
    """Its pages were computed, because loading them would have taken longer."""
    gain: float = 0.0
    """Seconds that its load saves, if all of it comes."""
    lets_pass: frozenset[str] = frozenset()
    """Requests that were loading when its own load failed, and go first."""
    state_tokens: int = 0
    """Of its prompt, behind which a state was given to the half to store; 0: none was."""
    num_saved: list[int] = field(default_factory=list)
    """Leading blocks that were given to the half to store, by group."""

    def __post_init__(self) -> None:
        self.num_saved = [0] * self.num_groups

    def hashes(self, hashes_a_block: Sequence[int]) -> list[Sequence[bytes]]:
        """By group, of the full blocks as far as the tokens are known. A block has so many links of the chain."""
        if self.chain is None:
            return [()] * len(hashes_a_block)
        if self.chain.num_tokens < self.request.num_tokens:
            self.chain.extend(self.request.all_token_ids[self.chain.num_tokens :])
        hashes = self.chain.hashes
        return [hashes if count == 1 else hashes[count - 1 :: count] for count in hashes_a_block]

    def stored_tokens(self, num_computed: int, block_size: int) -> tuple[int, int]:
        """Between which tokens its blocks are stored. Another instance that goes on with it needs all of them."""
        if self.hands_over:
            return 0, num_computed
        return self.hints.stored_tokens(self.request.num_prompt_tokens, num_computed, block_size)

    def restart(self, chain: BlockHashChain | None) -> None:
        """It was preempted: it begins again, with nothing."""
        self.chain = chain
        self.num_preemptions = self.request.num_preemptions
        self.num_saved = [0] * self.num_groups
        self.state_tokens = 0
        self.gain = 0.0
