"""Block hashes of an engine's requests: the names of their blocks in kvstore. The engine's objects are only read."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kvstore.connector.blocks.extra_keys import MultimodalInput, PrefixKeys, SharedPrefix
from kvstore.connector.blocks.hashing import BlockHashChain
from kvstore.connector.engine.weights import weights_fingerprint, weights_folder
from kvstore.errors import KVStoreError, ResourceError
from kvstore.hashing import hash_blocks
from kvstore.rare_lines import one_line

ADAPTER_WAIT = 1.0
"""Seconds for which the first request of a LoRA adapter waits for its weights to be looked at."""

MOST_SAID = 32
"""Most reasons that are logged, each once."""

_CONTENT_HASH = re.compile(r"(.+:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""How vLLM names a multimodal input by its content: SHA-256, BLAKE3 or SHA-512, behind a LoRA adapter's name."""

_logger = logging.getLogger("kvstore.connector")


class RequestHashes:
    """Block hashes of vLLM's requests, one for each ``block_size`` tokens: the ``gcd`` of the groups' block sizes. They
    are kvstore's own: vLLM's depend on PYTHONHASHSEED and on its settings.

    Args:
        block_size: tokens a hash.
        shared_prefixes: by name those that requests may share whatever their salts; an identifier is the hash of the
            tokens as one block, in hexadecimal digits.
    """

    def __init__(self, block_size: int, shared_prefixes: Mapping[str, SharedPrefix] | None = None) -> None:
        self.block_size = block_size
        self._shared_prefixes = dict(shared_prefixes or {})
        self._adapters: dict[tuple[str, str, int], Future[str]] = {}  # fingerprints of LoRA adapters
        self._asked_at: dict[tuple[str, str, int], float] = {}
        self._reader = ThreadPoolExecutor(1, "kvstore-adapters")
        self._said: set[str] = set()
        self._salt = ""

    @property
    def private(self) -> bool:
        """Whether no other engine has the same, since :meth:`reset` was called."""
        return bool(self._salt)

    def reset(self) -> None:
        """From now on no hash equals one that was made before, here or elsewhere."""
        self._salt = secrets.token_hex(16)

    def ready(self, request: Any) -> bool:
        """Whether the request's blocks can be named, or never will be. Nothing waits: ask again if not.

        What has to be read for it, a LoRA adapter's weights, is read in the background, for :data:`ADAPTER_WAIT` at
        most; then the request goes on without.
        """
        if request.lora_request is None:
            return True
        key = _adapter_key(request.lora_request)
        if key not in self._adapters:
            self._adapters[key] = self._reader.submit(_adapter_fingerprint, request.lora_request.lora_path)
            self._asked_at[key] = time.monotonic()
        return self._adapters[key].done() or time.monotonic() >= self._asked_at[key] + ADAPTER_WAIT

    @property
    def shared_prefixes(self) -> Collection[str]:
        """Names of those that requests may share."""
        return self._shared_prefixes.keys()

    def shared_prefix(self, request: Any, name: str) -> SharedPrefix | None:
        """The prefix of this name, where the request's prompt begins with all of it; None: it shares nothing.

        Nothing of a prompt that differs in a single token is shared, or who guesses a prefix would be told by the time
        of an answer how much of the guess is right.
        """
        prefix = self._shared_prefixes[name]
        length = prefix.num_tokens
        if (
            request.num_prompt_tokens >= length
            and request.prompt_embeds is None
            # Pictures are a tenant's own, and would be there without its salt.
            and all(feature.mm_position.offset >= length for feature in request.mm_features)
        ):
            try:
                (found,) = hash_blocks(request.all_token_ids[:length], length)
            except KVStoreError:  # a token that is none: the request's blocks have no names
                return None
            if found.hex() == prefix.identifier:
                return prefix
        self._say_once(
            f"shared prefix {name}",
            "the prompt of request %s does not begin with the shared prefix %r: nothing of it is shared",
            one_line(request.request_id),
            name,
        )
        return None

    def chain(self, request: Any, shared_prefix: SharedPrefix | None = None) -> BlockHashChain | None:
        """For one request, with the tokens that it has; None where its blocks can't be named for sure."""
        if request.resumable:  # its last token may be replaced
            return None
        try:
            chain = BlockHashChain(self.block_size, self._keys(request, shared_prefix))
            chain.extend(request.all_token_ids[:])
        except KVStoreError as error:
            # What is wrong with a request itself may be said with a number of its own, another one each time.
            reason = str(error) if isinstance(error, ResourceError) else type(error).__name__
            name = one_line(request.request_id)
            self._say_once(reason, "requests like %s are neither stored nor loaded: %s", name, error)
            return None
        return chain

    def _say_once(self, reason: str, text: str, *values: object) -> None:
        if reason not in self._said and len(self._said) < MOST_SAID:
            self._said.add(reason)
            _logger.warning(text, *values)

    def _keys(self, request: Any, shared_prefix: SharedPrefix | None) -> PrefixKeys:
        embeds = request.prompt_embeds
        for feature in request.mm_features:
            if not _CONTENT_HASH.fullmatch(feature.identifier):
                raise ResourceError("a multimodal input is named by something else than a hash of its content")
        return PrefixKeys(
            lora_name="" if request.lora_request is None else self._adapter(request.lora_request),
            multimodal=tuple(
                MultimodalInput(
                    identifier=feature.identifier, offset=feature.mm_position.offset, length=feature.mm_position.length
                )
                for feature in request.mm_features
            ),
            cache_salt="\0".join(filter(None, (self._salt, request.cache_salt))),
            shared_prefix=self._own(shared_prefix),
            prompt_embeds=None if embeds is None else embeds.contiguous().view(torch.uint8).numpy(),
        )

    def _own(self, prefix: SharedPrefix | None) -> SharedPrefix | None:
        """After a :meth:`reset` it is shared by this engine's requests alone."""
        if prefix is None or not self._salt:
            return prefix
        return SharedPrefix(identifier=f"{self._salt}\0{prefix.identifier}", num_tokens=prefix.num_tokens)

    def _adapter(self, lora: Any) -> str:
        """A LoRA adapter by its weights: a name, or a path, may stand for another one next time."""
        key = _adapter_key(lora)
        if getattr(lora, "load_inplace", False):  # from its next request on it is looked at again
            self._adapters.pop(key, None)
            raise ResourceError(f"the adapter {lora.lora_name} is being replaced")
        read = self._adapters.get(key)
        if read is None or not read.done():
            raise ResourceError(f"the weights of the adapter {lora.lora_name} were not read in time")
        try:
            return read.result()
        except Exception as error:
            raise ResourceError(f"the weights of the adapter {lora.lora_name} can't be read: {error}") from error


def _adapter_key(lora: Any) -> tuple[str, str, int]:
    return lora.lora_name, lora.lora_path, lora.lora_int_id


def _adapter_fingerprint(path: str) -> str:
    return weights_fingerprint(weights_folder(path, None, None, "adapter_config.json"))
