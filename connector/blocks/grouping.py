"""Cache groups: which layers of a model share a block table.

All groups of a model take their blocks from one pool, so a block must take the same bytes in each of them. Layers of
one kind become one group. In a hybrid model each kind is dealt out to groups of one number of layers, and all pages are
made equally large: by more tokens a block where the sizes divide each other, by padding where they do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvstore.connector.blocks.cache_config import KVCacheGroupSpec
from kvstore.connector.blocks.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvstore.errors import ConfigError


def get_kv_cache_groups(
    layers: Mapping[str, KVCacheSpec],
    *,
    disable_hybrid_kv_cache_manager: bool = False,
    eagle_layers: Collection[str] = (),
) -> tuple[KVCacheGroupSpec, ...]:
    """The groups of a model's layers, kind by kind in the order in which the kinds occur.

    They are vLLM's, with these differences:

    - Attention layers with the same bytes a token are alike, whatever their heads. There is no kind of its own for
      latent (MLA) attention, so every attention layer's page can be padded.
    - A page that is padded already is scaled together with its padding; vLLM fails there.
    - The layers of a drafting head are those that ``eagle_layers`` names, and mark their group in every model. vLLM
      finds them by what it knows of the models, and only in hybrid ones.

    Args:
        layers: by name, in the order of the model; none for a model without attention, which has no group.
        disable_hybrid_kv_cache_manager: keep the blocks of windows and chunks as if they were full attention, so that
            one group is enough.
        eagle_layers: those of a drafting head.

    Raises:
        ConfigError: one group was asked for, and the layers do not fit into one; nothing but full attention, with
            windows or chunks of several sizes; ``eagle_layers`` that are not among the layers.
    """
    for name in eagle_layers:
        if name not in layers:
            raise ConfigError(f"eagle_layers has {name}, which is none of the layers {list(layers)}")
    if not layers:
        return ()
    if disable_hybrid_kv_cache_manager:
        layers = _without_windows(layers)
    spec = _common_spec(layers)
    if spec is None and disable_hybrid_kv_cache_manager:
        raise ConfigError(
            "disable_hybrid_kv_cache_manager needs layers that can all be kept as full attention,"
            f" got {_description(layers)}"
        )
    groups = _hybrid_groups(_with_equal_pages(layers)) if spec is None else [(tuple(layers), spec)]
    return tuple(
        KVCacheGroupSpec(names, group_spec, is_eagle_group=any(name in eagle_layers for name in names))
        for names, group_spec in groups
    )


def _common_spec(layers: Mapping[str, KVCacheSpec]) -> KVCacheSpec | None:
    """What stands for all layers behind one block table, or None where they need several."""
    specs = tuple(layers.values())
    merged = _merged(specs)
    if merged is not None:
        return merged
    _check_one_window(specs)
    if all(spec.is_same_type(specs[0]) for spec in specs):
        return UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=dict(layers))
    return None


def _merged(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """The one spec that stands for all, or None.

    Full attention with a window or chunks stands for such without, since its blocks are the same.
    """
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    if not isinstance(first, FullAttentionSpec):
        return None
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    windows, chunks = _windows(full)
    if len(full) < len(specs) or len(windows) + len(chunks) > 1:
        return None
    window, chunk = max(windows, default=None), max(chunks, default=None)
    merged, *others = {replace(spec, sliding_window=window, attention_chunk_size=chunk) for spec in full}
    return None if others else merged


def _windows(specs: Sequence[FullAttentionSpec]) -> tuple[set[int], set[int]]:
    """All sizes of windows, and all of chunks."""
    return (
        {spec.sliding_window for spec in specs if spec.sliding_window is not None},
        {spec.attention_chunk_size for spec in specs if spec.attention_chunk_size is not None},
    )


def _check_one_window(specs: Sequence[KVCacheSpec]) -> None:
    """Check that full attention alone has one size of windows, and one of chunks: a group has no place for two."""
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    if len(full) < len(specs):
        return
    for what, sizes in zip(("sliding_window", "attention_chunk_size"), _windows(full), strict=True):
        if len(sizes) > 1:
            raise ConfigError(f"layers that are kept as full attention have several {what}: {sorted(sizes)}")


def _without_windows(layers: Mapping[str, KVCacheSpec]) -> Mapping[str, KVCacheSpec]:
    """The layers, those with windows or chunks kept as full attention where the model has such.

    They take the block size of full attention where that has only one.
    """
    block_sizes = {spec.block_size for spec in layers.values() if isinstance(spec, FullAttentionSpec)}
    if not block_sizes:
        return layers
    block_size = block_sizes.pop() if len(block_sizes) == 1 else None
    return {name: _as_full_attention(spec, block_size or spec.block_size) for name, spec in layers.items()}


def _as_full_attention(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    padded = spec.page_size_padded
    return FullAttentionSpec(
        block_size=block_size,
        token_bytes=spec.token_bytes,
        page_size_padded=None if padded is None else max(padded, block_size * spec.token_bytes),
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        attention_chunk_size=spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None,
    )


def _with_equal_pages(layers: Mapping[str, KVCacheSpec]) -> Mapping[str, KVCacheSpec]:
    """The layers with pages as large as the largest of them."""
    page_bytes = max(spec.page_size_bytes for spec in layers.values())
    return {name: _with_page(spec, page_bytes) for name, spec in layers.items()}


def _with_page(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    if spec.page_size_bytes == page_bytes:
        return spec
    # A state is as large as it is, however many tokens it stands for.
    if isinstance(spec, AttentionSpec) and page_bytes % spec.page_size_bytes == 0:
        return replace(
            spec,
            block_size=spec.block_size * (page_bytes // spec.page_size_bytes),
            page_size_padded=None if spec.page_size_padded is None else page_bytes,
        )
    return replace(spec, page_size_padded=page_bytes)


def _hybrid_groups(layers: Mapping[str, KVCacheSpec]) -> list[tuple[tuple[str, ...], KVCacheSpec]]:
    """Deal each kind of layers out to groups of one number of layers; what is missing in the last ones is padding.

    Hybrid models repeat a pattern like five windows and one full attention, so the number of layers of the rarest kind
    is the number of repetitions, and a group takes one layer of each. Where the kinds are nearly equally frequent, as
    with a drafting head that adds a layer to one of them, that would leave nearly empty groups behind: then the most
    frequent kind decides.
    """
    kinds = _kinds(layers)
    rarest = min(len(names) for names in kinds)
    most_frequent = max(len(names) for names in kinds)
    group_size = most_frequent if 2 * most_frequent < 3 * rarest else rarest
    groups = []
    for names in kinds:
        num_groups = -(-len(names) // group_size)
        for index in range(num_groups):
            # Each n-th layer and not n in a row: so every stage of a pipeline has its share of every group.
            group = tuple(names[index::num_groups])
            spec = _merged([layers[name] for name in group])
            assert spec is not None, f"layers of one kind do not merge: {group}"
            groups.append((group, spec))
    return groups


def _kinds(layers: Mapping[str, KVCacheSpec]) -> list[list[str]]:
    """The layers' names by kind: equal specs first, then kinds that one spec can stand for."""
    equal: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        equal.setdefault(spec, []).append(name)
    kinds: list[tuple[list[KVCacheSpec], list[str]]] = []
    for spec, names in equal.items():
        for specs, kind_names in kinds:
            if _merged([*specs, spec]) is not None:
                specs.append(spec)
                kind_names.extend(names)
                break
        else:
            kinds.append(([spec], names))
    return [names for _, names in kinds]


def _description(layers: Mapping[str, KVCacheSpec]) -> str:
    """Each kind of layer with its block size, and how often it occurs."""
    counts: dict[str, int] = {}
    for spec in layers.values():
        what = f"{spec.kind} in blocks of {spec.block_size}"
        counts[what] = counts.get(what, 0) + 1
    return ", ".join(f"{count} x {what}" for what, count in counts.items())
