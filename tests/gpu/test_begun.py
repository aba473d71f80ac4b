"""Copies that begin now and are waited for later, on a device that is done when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from held_device import HeldDevice
from kv_layouts import random_pages

from kvstore.gpu.begun import DONE, SeveralCopies
from kvstore.gpu.cuda import DeviceCopies
from kvstore.gpu.mixed import MixedKV
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.quantized import QuantizedKV

LAYERS = 5


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HeldDevice:
    device = HeldDevice()
    monkeypatch.setattr("kvstore.gpu.paged_kv.HostCopies", lambda layers, layout: DeviceCopies(layers, layout, device))
    monkeypatch.setattr(DeviceCopies, "_measure", lambda copies: None)
    return device


@pytest.fixture
def layers() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [64, 64, 64, 40, 40]
    return [torch.randint(0, 256, (8, size), dtype=torch.uint8, generator=generator) for size in sizes]


@pytest.fixture
def kv(device: HeldDevice, layers: list[torch.Tensor]) -> MixedKV:
    return MixedKV([PagedKV(layers[:3], "block dim"), PagedKV(layers[3:], "block dim")])


def page_of(layers: Sequence[torch.Tensor], block: int) -> bytes:
    return b"".join(layer[block].numpy().tobytes() for layer in layers)


def test_a_copy_is_queued_when_it_begins_and_done_when_it_was_waited_for(
    kv: MixedKV, layers: list[torch.Tensor], device: HeldDevice
) -> None:
    page = np.zeros(kv.page_bytes, np.uint8)

    copy = kv.begin_gather([3], [page])

    assert device.under_way("gather") == 2
    assert not copy.is_done
    assert not page.any()
    copy.wait()
    assert copy.is_done
    assert page.tobytes() == page_of(layers, 3)


def test_stretches_cost_one_wait(kv: MixedKV, device: HeldDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    run_to = device.run_to
    monkeypatch.setattr(device, "run_to", lambda event: (waits.append(device.under_way("gather")), run_to(event)))

    kv.begin_gather([3], [np.zeros(kv.page_bytes, np.uint8)]).wait()

    assert [under_way for under_way in waits if under_way] == [2]


def test_layers_of_all_stretches_are_told_in_their_order(
    kv: MixedKV, layers: list[torch.Tensor], device: HeldDevice
) -> None:
    (page,) = random_pages(1, kv.page_bytes, seed=1)
    told: list[int] = []

    copy = kv.begin_scatter([page], [2], told.append)

    assert device.under_way("scatter") == 2
    assert not told
    copy.wait()
    assert told == list(range(LAYERS))
    assert page_of(layers, 2) == page.tobytes()


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("number", range(2))
def test_a_stretch_that_can_not_be_queued_leaves_none_under_way(
    kv: MixedKV, device: HeldDevice, number: int, by_layer: bool
) -> None:
    pages = random_pages(1, kv.page_bytes, seed=1)
    device.fails_to_queue = lambda direction, queued: queued == number

    with pytest.raises(RuntimeError, match="out of memory"):
        kv.begin_scatter(pages, [2], (lambda layer: None) if by_layer else None)

    assert device.under_way("scatter") == 0


def test_behind_a_layer_that_failed_none_is_told_nor_queued(kv: MixedKV, device: HeldDevice) -> None:
    """Whoever waits for a layer would take those before it as there."""
    pages = random_pages(1, kv.page_bytes, seed=1)
    told: list[int] = []
    copy = kv.begin_scatter(pages, [2], told.append)
    device.fails = lambda direction, number: (
        number == 3
    )  # behind the first layer of each stretch: the first one's third

    with pytest.raises(RuntimeError, match="illegal memory access"):
        copy.wait()

    assert told == [0, 1]
    assert device.under_way("scatter") == 0
    assert device.begun["scatter"] == 4
    copy.end()


def test_a_copy_that_nobody_wants_any_more_tells_of_no_layer_and_queues_none(kv: MixedKV, device: HeldDevice) -> None:
    told: list[int] = []
    copy = kv.begin_scatter(random_pages(1, kv.page_bytes, seed=1), [2], told.append)

    copy.end()

    assert (told, device.under_way("scatter"), device.begun["scatter"]) == ([], 0, 2)
    assert copy.is_done


def test_of_several_copies_all_are_ended_also_where_one_fails() -> None:
    ended: list[str] = []

    class Copy:
        is_done = False

        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            raise RuntimeError(self.name)

        def end(self) -> None:
            ended.append(self.name)
            raise RuntimeError(f"{self.name} again")

    copies = SeveralCopies([lambda name=name: Copy(name) for name in "abc"], in_order=True)
    with pytest.raises(RuntimeError):
        copies.wait()
    assert sorted(ended) == ["a", "b", "c"]


def test_blocks_are_encoded_when_they_were_copied(device: HeldDevice) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(8, 2, 4, 2, 8, dtype=torch.float16) for _ in range(2)]
    kv = QuantizedKV(PagedKV(tensors, "block kv token head dim"), "int8")
    at_once, later = (np.zeros(kv.page_bytes, np.uint8) for _ in range(2))
    kv.gather([3], [at_once])

    copy = kv.begin_gather([3], [later])

    assert not copy.is_done
    assert not later.any()
    copy.wait()
    assert later.tobytes() == at_once.tobytes()


def test_a_device_that_failed_copies_nothing_more(kv: MixedKV, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    copy = kv.begin_gather([3], [np.zeros(kv.page_bytes, np.uint8)])
    monkeypatch.setattr("held_device.QueuedEvent.query", fail)
    assert copy.is_done
    copy.end()


def test_in_host_memory_a_copy_is_done_when_it_has_begun(layers: list[torch.Tensor]) -> None:
    kv = PagedKV(layers[:3], "block dim")
    page = np.zeros(kv.page_bytes, np.uint8)
    assert kv.begin_gather([3], [page]) is DONE
    assert page.tobytes() == page_of(layers[:3], 3)
    assert kv.begin_scatter([page], [5]) is DONE
    assert page_of(layers[:3], 5) == page.tobytes()
