"""Copies by torch alone, for devices without a mover of their own. Here with tensors in host memory: no such device is at hand."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from offload_world import World, device, is_unmapped, random_pages

from kvstore_sdk.backend import Region
from kvstore_sdk.layout import AttentionShape, Topology
from kvstore_sdk.vllm.offloading import device as device_module
from kvstore_sdk.vllm.offloading.copies import DevicePages
from kvstore_sdk.vllm.offloading.device import HostMover, TorchMover

FOUR = AttentionShape(layers=2, blocks=4, block_tokens=4, heads=2, token_head_bytes=6)
ONE_RANK = Topology(1, (2,))


def test_torch_copies_what_the_movers_of_a_device_do() -> None:
    """The same bytes to the same places, for a device that has none of its own."""
    made = [World([FOUR], [Topology(2, (1, 1))], mover=mover) for mover in (HostMover, TorchMover)]
    for each in made:
        rng = np.random.default_rng(8)
        for block in range(7):
            each.compute(0, block, random_pages(FOUR, rng))
        assert each.store(device([[3, 0, 6, 1, 2, 5]], [2]), [4, 1], 1) == 6 * 2 * 4 * 2 * 6
        each.load([4, 1], device([[20, 9, 11, 12, 23, 13]], [2]))
        assert all((each.cache(rank, 0)[[20, 9]] == each.cache(rank, 0)[[3, 0]]).all() for rank in range(2))
    assert made[0].bytes[made[0].start :].tobytes() == made[1].bytes[made[1].start :].tobytes()
    assert all(np.array_equal(made[0].cache(rank, 0), made[1].cache(rank, 0)) for rank in range(2))
    for each in made:
        each.close()


def test_torch_lets_go_of_the_region() -> None:
    made = World([FOUR], [ONE_RANK], mover=TorchMover)
    made.workers[0].submit_store(1, device([range(4)], [0]), made.slots([2], 1))
    made.close()
    assert is_unmapped(made.region)


def test_xpu_is_served_by_torch_and_told_to_be_untested(caplog: pytest.LogCaptureFixture) -> None:
    """No call of CUDA's is made for it."""
    plain = torch.zeros((4, 8), dtype=torch.int8)
    tensor = SimpleNamespace(device=SimpleNamespace(type="xpu"), shape=plain.shape, as_strided=plain.as_strided)
    region = Region(4096)
    with caplog.at_level(logging.WARNING, "kvstore_sdk"):
        mover = device_module._mover([DevicePages(tensor, 4, 8)], region)
    assert isinstance(mover, TorchMover)
    assert "nobody has run this" in caplog.text
    mover.close()
    region.close()
