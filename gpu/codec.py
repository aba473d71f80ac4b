"""Lossy codecs for pages, int8 and fp8: one byte an element, and a float32 scale for each head of keys, or values, of
each layer.

A page of 16- or 32-bit floats becomes a half or a quarter as long. What comes back differs: by at most half a step of
1/127 of the head's largest element (``int8``), or by one part in 16 of each element (``fp8``: e4m3, which has 3 bits
behind the point). What is lost is lost for good, and each time that a page made of such pages is stored again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidRequestError
from kvstore.gpu.layout import PageLayout

_SCALE_BYTES = 4
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_ELEMENT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CODECS = tuple(_LARGEST)
"""What a :class:`kvstore.Layout` may name in ``codec``."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How pages of one layout are made smaller.

    An encoded page is its scales, float32, then its elements, both in the order of the page.

    Raises:
        InvalidRequestError: no such codec, or elements that are no floats of 16 or 32 bits.
    """

    name: str
    layout: PageLayout
    dtype: torch.dtype
    """Of the page's elements."""

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise InvalidRequestError(f"codec {self.name!r} is unknown; known: {', '.join(CODECS)}")
        if self.dtype not in _DTYPES:
            raise InvalidRequestError(
                f"codec {self.name!r} takes {', '.join(str(dtype) for dtype in _DTYPES)}, got {self.dtype}"
            )

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of a page's scales: its own shape with one for all tokens and elements of a head."""
        names = ("layer", *self.layout.inside)
        pairs = zip(names, self.layout.page_shape, strict=True)
        return tuple(1 if name in ("token", "dim") else size for name, size in pairs)

    @property
    def page_bytes(self) -> int:
        """Bytes an encoded page."""
        return math.prod(self.scale_shape) * _SCALE_BYTES + math.prod(self.layout.page_shape)

    def encode(self, pages: torch.Tensor) -> torch.Tensor:
        """Make pages smaller.

        Args:
            pages: ``(pages, *page_shape)`` of ``dtype``. What is no number becomes 0, what is infinite the largest
                number of the type.

        Returns:
            ``(pages, page_bytes)`` uint8, on the same device.
        """
        values = pages.nan_to_num(nan=0.0).float()
        shared = [place + 1 for place, size in enumerate(self.scale_shape) if size != self.layout.page_shape[place]]
        largest = values.abs().amax(shared, keepdim=True) if shared else values.abs()
        scales = torch.where(largest > 0, largest / _LARGEST[self.name], 1.0)
        scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
        limit = _LARGEST[self.name]
        scaled = (values / scales).clamp(-limit, limit)  # a rounded scale may be a little too small
        if self.name == "int8":
            scaled = scaled.round()
        parts = (scales, scaled.to(_ELEMENT[self.name]))
        return torch.cat([part.reshape(len(pages), -1).view(torch.uint8) for part in parts], dim=1)

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """The pages again, as far as they are left.

        Args:
            encoded: ``(pages, page_bytes)`` uint8.

        Returns:
            ``(pages, *page_shape)`` of ``dtype``, on the same device.
        """
        at = math.prod(self.scale_shape) * _SCALE_BYTES
        count = len(encoded)
        scales = encoded[:, :at].contiguous().view(torch.float32).view(count, *self.scale_shape)
        elements = encoded[:, at:].contiguous().view(_ELEMENT[self.name]).view(count, *self.layout.page_shape)
        values = elements.float() * scales
        limit = torch.finfo(self.dtype).max  # of the largest element, rounding may make slightly more than that
        return values.clamp(-limit, limit).to(self.dtype)
