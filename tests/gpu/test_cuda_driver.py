from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from driver_library import STREAM, Call, DriverLibrary

from kvstore.errors import ResourceError
from kvstore.gpu.cuda_driver import BatchedMemcpy


def addresses(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([row.ctypes.data for row in rows], np.uint64)


def copy(library: DriverLibrary, *, stable_source: bool = False, stream: int = STREAM) -> npt.NDArray[np.uint8]:
    """Three rows of bytes, the last one first."""
    source = np.arange(24, dtype=np.uint8).reshape(3, 8)
    target = np.zeros_like(source)
    sizes = np.array([8, 4, 1], np.uint64)
    call = BatchedMemcpy(library, lambda: stream)
    call(addresses(target), addresses(source)[::-1].copy(), sizes, stable_source=stable_source)
    return target


@pytest.mark.parametrize(("stable_source", "order"), [(False, 1), (True, 3)])
def test_one_call_has_every_copy_its_stream_and_when_sources_may_be_read(stable_source: bool, order: int) -> None:
    library = DriverLibrary()

    copied = copy(library, stable_source=stable_source)

    assert copied.tolist() == [[*range(16, 24)], [8, 9, 10, 11, 0, 0, 0, 0], [0] * 8]
    assert library.calls == [Call((8, 4, 1), order, STREAM)]


def test_lists_with_strides_are_read_as_they_are_seen() -> None:
    source, target = np.arange(32, dtype=np.uint8).reshape(4, 8), np.zeros((4, 8), np.uint8)
    sizes = np.full((4, 2), 8, np.uint64)

    BatchedMemcpy(DriverLibrary(), lambda: STREAM)(
        addresses(target)[::2], addresses(source)[::-2], sizes[:2, 1], stable_source=True
    )

    assert target.tolist() == [[*range(24, 32)], [0] * 8, [*range(8, 16)], [0] * 8]


def test_nothing_to_copy_is_no_call() -> None:
    library, none = DriverLibrary(), np.array([], np.uint64)

    BatchedMemcpy(library, lambda: STREAM)(none, none, none, stable_source=True)

    assert library.calls == []


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (DriverLibrary(status=1, failed=2), r"refused 3 copies, at copy 2: error 1 \(invalid argument\)"),
        (
            DriverLibrary(status=900, failed=2**64 - 1),
            r"refused 3 copies: error 900 \(operation not permitted when stream",
        ),
        (DriverLibrary(status=719, failed=2**64 - 1), r"refused 3 copies: error 719$"),
    ],
)
def test_what_the_driver_refuses_is_told_in_its_words(library: DriverLibrary, says: str) -> None:
    with pytest.raises(ResourceError, match=says):
        copy(library)


def test_the_legacy_default_stream_is_refused() -> None:
    with pytest.raises(ResourceError, match="invalid argument"):
        copy(DriverLibrary(), stream=0)


@pytest.mark.parametrize("library", [DriverLibrary(missing=500), SimpleNamespace()], ids=["before 12.8", "before 12.0"])
def test_a_driver_without_the_call_says_which_one_has_it(library: DriverLibrary) -> None:
    with pytest.raises(ResourceError, match=r"no cuMemcpyBatchAsync, which came with CUDA 12\.8"):
        BatchedMemcpy(library, lambda: STREAM)
