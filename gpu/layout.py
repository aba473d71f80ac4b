"""Page layout: which bytes of a paged KV cache make up a page, in which order. Plain numbers: no tensor is touched.

An engine declares its KV tensors by the names of their axes, in the order of the tensor's dimensions::

    kv block token head dim            one tensor a layer: keys of all blocks, then values
    block kv token head dim            one tensor a layer: a block's keys, then its values
    block head token dim               keys and values side by side in dim
    block token dim                    MLA: one latent vector a token
    head block token dim               all blocks of one head, then of the next
    block dim                          recurrent states: one a block
    layer kv block token head dim      one tensor for all layers; layer may stand anywhere

A page is ``page_tokens`` tokens of all layers: first by layer, then in the order in which a block's inside lies in
memory. So a page and a block agree in long runs of bytes, whatever the order of dimensions that a tensor shows, and the
order is part of the page's :attr:`~PageLayout.format`.

A page need not be as long as a block: one may be several times the other. The shorter of the two is a *piece*, the
longest stretch of tokens that both hold as they are. Blocks hold ``pieces_per_block``: piece ``i`` of block ``b`` has
the number ``b * pieces_per_block + i``. Pages hold ``pieces_per_page``. Where both are equally long, a block is one
piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequestError

AXES = ("layer", "kv", "block", "token", "head", "dim")
"""Every name that an axis may have."""

KV_FIRST = "kv block token head dim"
PAGE_FORMAT = "layer-kv-token-head-dim/1"
"""The format of pages of :data:`KV_FIRST`, and of ``block kv token head dim``."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the bytes of a piece are, in as few and as long runs as there are.

    In one layer of a block they begin, for each part and each row, at
    ``part * part_stride + block * block_stride + row * row_stride + piece * run_bytes``, and in a page they lie densely
    in the order ``[layer][part][row][piece][byte]``. All in bytes; the stride of a single part or row is 0.
    """

    parts: int
    part_stride: int
    block_stride: int
    rows: int
    row_stride: int
    pieces_per_block: int
    pieces_per_page: int
    run_bytes: int

    @property
    def of_a_layer(self) -> int:
        """How many there are in one layer of a page."""
        return self.parts * self.rows * self.pieces_per_page


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One layer's KV tensor, how many such layers there are, and the pages that they are cut into."""

    layers: int
    axes: tuple[str, ...]
    """A layer's axes by name, in the order of its tensor's dimensions."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    """Bytes an element."""
    page_tokens: int

    @classmethod
    def describe(
        cls,
        axes: str,
        shape: Sequence[int],
        strides: Sequence[int],
        itemsize: int,
        *,
        layers: int = 1,
        page_tokens: int | None = None,
    ) -> PageLayout:
        """The layout of tensors with these axes.

        Args:
            axes: names of a layer's axes, ``layer`` not among them.
            shape: of one layer's tensor.
            strides: of one layer's tensor, in bytes. Those of ``block``, and of ``kv`` or ``head`` where a block has it
                outermost, are free; the rest of a block must lie densely, in any order.
            itemsize: bytes an element.
            layers: how many tensors are alike.
            page_tokens: tokens a page: a multiple or a divisor of those of a block; as many as a block where not given.

        Raises:
            InvalidRequestError: an axis that is unknown, missing, given twice or empty, a block with gaps, or pages
                that do not go into blocks, nor blocks into pages.
        """
        names = tuple(axes.split())
        check_axes(names, axes)
        if "layer" in names:
            raise InvalidRequestError(f"axes {axes!r}: one layer's tensor has no axis 'layer'")
        if layers < 1:
            raise InvalidRequestError(f"a paged KV needs at least 1 layer, got {layers}")
        if len(shape) != len(names) or 0 in shape:
            raise InvalidRequestError(
                f"a layer's KV must have the {len(names)} axes ({', '.join(names)}), none of them empty,"
                f" got shape {tuple(shape)}"
            )
        sizes = dict(zip(names, shape, strict=True))
        block_tokens = sizes.get("token", 1)
        tokens = block_tokens if page_tokens is None else page_tokens
        if tokens < 1 or (tokens % block_tokens and block_tokens % tokens):
            raise InvalidRequestError(
                f"pages of {tokens} tokens and blocks of {block_tokens}: one must be a multiple of the other"
            )
        if "token" not in names and tokens != 1:
            raise InvalidRequestError(f"blocks without an axis 'token' are pages, there are none of {tokens} tokens")
        layout = cls(layers, names, tuple(shape), tuple(strides), itemsize, tokens)
        layout._check_dense()
        return layout

    @property
    def sizes(self) -> dict[str, int]:
        """By axis."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def inside(self) -> tuple[str, ...]:
        """The axes of a block, as they lie in memory: outermost first."""
        names = [name for name in self.axes if name != "block"]
        # The stride of a single element says nothing: where the others are in order, so are all.
        strides = [self._stride(name) for name in names if self.sizes[name] > 1]
        if strides == sorted(strides, reverse=True):
            return tuple(names)
        return tuple(sorted(names, key=self._stride, reverse=True))

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold."""
        return self.sizes["block"]

    @property
    def block_tokens(self) -> int:
        """Tokens a block."""
        return self.sizes.get("token", 1)

    @property
    def piece_tokens(self) -> int:
        """Tokens a piece."""
        return min(self.block_tokens, self.page_tokens)

    @property
    def pieces_per_block(self) -> int:
        """More than 1 where blocks are longer than pages."""
        return self.block_tokens // self.piece_tokens

    @property
    def pieces_per_page(self) -> int:
        """More than 1 where pages are longer than blocks."""
        return self.page_tokens // self.piece_tokens

    @property
    def num_pieces(self) -> int:
        """Pieces that the tensors hold."""
        return self.num_blocks * self.pieces_per_block

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Elements of a page: ``(layers, ...)``, then :attr:`inside` with the page's tokens."""
        sizes = self.sizes | {"token": self.page_tokens}
        return (self.layers, *(sizes[name] for name in self.inside))

    @property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return math.prod(self.page_shape) * self.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a page."""
        return self.page_bytes // self.layers

    @property
    def format(self) -> str:
        """This order's name and version: what a :class:`kvstore.Layout` says in its ``format``."""
        return "-".join(("layer", *self.inside)) + "/1"

    @property
    def runs(self) -> Runs:
        """Where a piece's bytes are."""
        inside, sizes = self.inside, self.sizes
        parts, part_stride = 1, 0
        if inside[0] == "kv" or (inside[0] == "head" and self._is_apart("head")):
            parts, part_stride = sizes[inside[0]], self._stride(inside[0])
            inside = inside[1:]
        at = inside.index("token") if "token" in inside else 0
        rows = math.prod(sizes[name] for name in inside[:at])
        token_bytes = math.prod(sizes[name] for name in inside[at:] if name != "token") * self.itemsize
        run_bytes, row_stride = self.piece_tokens * token_bytes, self.block_tokens * token_bytes
        if self.pieces_per_block == self.pieces_per_page == 1:  # rows touch, here and there
            rows, run_bytes = 1, rows * run_bytes
            if part_stride == run_bytes:
                parts, run_bytes = 1, parts * run_bytes
        return Runs(
            parts,
            part_stride if parts > 1 else 0,
            self._stride("block"),
            rows,
            row_stride if rows > 1 else 0,
            self.pieces_per_block,
            self.pieces_per_page,
            run_bytes,
        )

    def touching(self, starts: Sequence[int]) -> int:
        """How many layers at a time lie side by side in every block, as they do in a page: a copy of all of them is one
        run (:meth:`merged`).

        The layers are taken in turns of so many, from the first one on. 1 where layers lie apart, or in another order,
        and where a layer of a page is not one run.

        Args:
            starts: where each layer's first block begins, in bytes, in the order of the layers.
        """
        runs = self.runs
        if runs.of_a_layer > 1 or runs.pieces_per_block > 1:
            return 1
        gaps = [number for number in range(1, self.layers) if starts[number] - starts[number - 1] != runs.run_bytes]
        return math.gcd(self.layers, *gaps)

    def merged(self, count: int) -> PageLayout:
        """The layout in which so many layers that touch (:meth:`touching`) are one. Its pages have the same bytes, and
        each of its layers begins where the first one of those does."""
        if count == 1:
            return self
        runs = self.runs
        elements = count * runs.run_bytes // self.itemsize
        strides = (runs.block_stride, self.itemsize)
        shape = (self.num_blocks, elements)
        return PageLayout(self.layers // count, ("block", "dim"), shape, strides, self.itemsize, page_tokens=1)

    def _stride(self, name: str) -> int:
        return self.strides[self.axes.index(name)]

    def _is_apart(self, outermost: str) -> bool:
        """Whether something else lies between the elements of a block's outermost axis."""
        inner = math.prod(size for name, size in self.sizes.items() if name not in ("block", outermost))
        return self._stride(outermost) != inner * self.itemsize

    def _check_dense(self) -> None:
        step = self.itemsize
        for place, name in reversed(list(enumerate(self.inside))):
            if self.sizes[name] > 1 and self._stride(name) != step and (place or name not in ("kv", "head")):
                raise InvalidRequestError(
                    f"the inside of a block must be contiguous: axis {name!r} has a stride of {self._stride(name)}"
                    f" bytes where {step} follow each other"
                )
            step *= self.sizes[name]


def check_axes(names: Sequence[str], axes: str) -> None:
    """Whether these names declare a paged KV.

    Raises:
        InvalidRequestError: they do not; the message names ``axes``.
    """
    if unknown := [name for name in names if name not in AXES]:
        raise InvalidRequestError(f"axes {axes!r}: unknown axis {unknown[0]!r}; known: {', '.join(AXES)}")
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise InvalidRequestError(f"axes {axes!r}: axis {twice[0]!r} is there twice")
    if missing := [name for name in ("block", "dim") if name not in names]:
        raise InvalidRequestError(f"axes {axes!r}: axis {missing[0]!r} is missing")
