"""A paged KV whose pages are stored quantized: by a lossy codec (:mod:`kvstore.gpu.codec`), int8 or fp8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu.begun import DONE, BegunCopy
from kvstore.gpu.codec import Codec
from kvstore.gpu.cuda import Event
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.tensors import PageBytes


class QuantizedKV:
    """:class:`kvstore.gpu.paged_kv.PagedKV` with a codec between blocks and pages: it has the same methods.

    The codec runs in the caller's thread, on the processor: pages cross the bus as they are, and through a buffer.

    Args:
        kv: the blocks.
        codec: one of :data:`kvstore.gpu.codec.CODECS`.

    Raises:
        InvalidRequestError: no such codec, or it does not take the elements of these blocks.
    """

    def __init__(self, kv: PagedKV, codec: str) -> None:
        self._kv = kv
        self.codec = Codec(codec, kv.layout, kv.dtype)
        self.layout = kv.layout

    @property
    def page_bytes(self) -> int:
        """Bytes an encoded page."""
        return self.codec.page_bytes

    def mark(self) -> Event | None:
        """As :meth:`PagedKV.mark`."""
        return self._kv.mark()

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> None:
        """Copy blocks out, into encoded pages of :attr:`page_bytes`. Otherwise as :meth:`PagedKV.gather`."""
        self.begin_gather(piece_ids, out, after).wait()

    def scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> None:
        """Copy encoded pages into blocks. Otherwise as :meth:`PagedKV.scatter`."""
        self.begin_scatter(pages, piece_ids, on_layer, after).wait()

    def begin_gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> BegunCopy:
        """As :meth:`PagedKV.begin_gather`; pages are encoded when the blocks were copied."""
        plain = np.empty((len(out), self._kv.page_bytes), np.uint8)
        copy = self._kv.begin_gather(piece_ids, list(plain), after)
        encoding = _Encoding(copy, partial(self._encode, plain, out))
        if not copy.is_done:
            return encoding
        encoding.wait()  # now: the buffer need not wait
        return DONE

    def begin_scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> BegunCopy:
        """As :meth:`PagedKV.begin_scatter`; pages are decoded at once."""
        if not pages:
            return DONE
        decoded = self.codec.decode(torch.from_numpy(np.stack(pages)))
        plain = decoded.reshape(len(pages), -1).view(torch.uint8).numpy()
        return self._kv.begin_scatter(list(plain), piece_ids, on_layer, after)

    def _encode(self, plain: npt.NDArray[np.uint8], out: Sequence[PageBytes]) -> None:
        pages = torch.from_numpy(plain).view(self._kv.dtype).view(len(out), *self.layout.page_shape)
        for page, encoded in zip(out, self.codec.encode(pages).numpy(), strict=True):
            np.copyto(page, encoded)


class _Encoding:
    """A copy into a buffer, which is encoded by whoever waits for it."""

    def __init__(self, copy: BegunCopy, encode: Callable[[], None]) -> None:
        self._copy = copy
        self._encode: Callable[[], None] = encode

    @property
    def is_done(self) -> bool:
        return self._copy.is_done

    def wait(self) -> None:
        self._copy.wait()
        self._encode()

    def end(self) -> None:
        self._copy.end()
