"""INT-10: a chunk that lacks blocks which a reader could need is never stored, however late vLLM stores it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_engines import Engine, fs_entry
from vllm_models import ModelShop, prompts
from vllm_records import record_paths
from vllm_stand import FullAttentionSpec, Layer, Stand

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.facts import spare_pages
from kvstore_sdk.vllm.marks import RowMarks, marks_path
from kvstore_sdk.vllm.memory import RowMemory
from kvstore_sdk.vllm.worker import HostCopies, ScrubbedHandler, ScrubbedWorker, SlotLayout

PER_CHUNK, ROWS, PAGE = 4, 8, 64


@pytest.fixture
def marks(tmp_path: Path) -> tuple[RowMarks, RowMarks]:
    """The worker's side and the scheduler's."""
    region = str(tmp_path / "vllm_offload_engine.mmap")
    mine = RowMarks.create(region, 0, ROWS)
    return mine, RowMarks.open(region, 0, ROWS)


@pytest.fixture
def store(marks: tuple[RowMarks, RowMarks]) -> Callable[..., list[int]]:
    """Stores blocks, given group by group with the number of the first, and says which rows are marked then. Two pages are spare."""
    region = SimpleNamespace(
        _row_stride=4096, total_size_bytes=ROWS * 4096, _base=torch.zeros(ROWS * 4096, dtype=torch.int8), cleanup=lambda: None
    )
    tensors = [SimpleNamespace(tensor=torch.zeros((100, PAGE), dtype=torch.int8), page_size_bytes=PAGE)]
    refs = [[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]] * 2
    caches = SimpleNamespace(tensors=tensors, group_data_refs=refs)
    layout = SlotLayout(caches, PER_CHUNK, 0, [2, 0])
    worker = ScrubbedWorker(HostCopies(caches, layout, region), layout, region, marks[0])

    def run(blocks: list[tuple[int, int]], rows: list[int]) -> list[int]:
        sizes = [size for size, _ in blocks]
        device = SimpleNamespace(block_ids=np.arange(sum(sizes)), group_sizes=sizes, block_indices=[first for _, first in blocks])
        worker.submit_store(1, device, SimpleNamespace(block_ids=np.array(rows)))
        return np.flatnonzero(marks[1].marked(range(ROWS))).tolist()

    return run


@pytest.mark.parametrize(
    ("blocks", "rows", "marked"),
    [
        ([(8, 0), (4, 0)], [0, 1, 2], []),
        ([(6, 2), (0, 0)], [0, 1], []),
        ([(5, 3), (0, 0)], [0, 1], [0]),
        ([(0, 0), (3, 1)], [5], [5]),
        # One block is missing somewhere behind the first: which chunk has got whose blocks cannot be told.
        ([(7, 0), (4, 0)], [0, 1, 2], [0, 1]),
        ([(2, 3), (4, 4)], [6, 7, 2], [6, 7]),
    ],
    ids=["whole", "two spare pages", "one page too many", "a group without a window", "a hole", "two holes"],
)
def test_a_row_is_marked_when_a_reader_could_need_what_it_lacks(
    blocks: list[tuple[int, int]], rows: list[int], marked: list[int], store: Callable[..., list[int]]
) -> None:
    assert store(blocks, rows) == marked


def test_the_next_chunk_in_a_row_is_judged_for_itself(store: Callable[..., list[int]]) -> None:
    assert store([(1, 3), (0, 0)], [4]) == [4]
    assert store([(4, 0), (0, 0)], [4]) == []


def test_vllms_own_handler_of_an_older_version_has_its_rows_marked(marks: tuple[RowMarks, RowMarks]) -> None:
    """vLLM 0.24 on a GPU: the copy is still to come when the row is marked, and no byte of it could say so."""
    mine, theirs = marks
    region = SimpleNamespace(_row_stride=4096, _base=torch.zeros(ROWS * 4096, dtype=torch.int8))
    tensor = SimpleNamespace(tensor=torch.zeros((9, PAGE), dtype=torch.int8), page_size_bytes=PAGE)
    caches = SimpleNamespace(tensors=[tensor], group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]])
    seen: list[list[bool]] = []
    inner = SimpleNamespace(transfer_async=lambda job_id, spec: not seen.append(theirs.marked(range(ROWS)).tolist()))  # type: ignore[func-returns-value]
    handler = ScrubbedHandler(inner, SlotLayout(caches, PER_CHUNK, 0, [2]), region, mine)
    device = SimpleNamespace(block_ids=np.arange(1), group_sizes=[1], block_indices=[3])
    assert handler.transfer_async(1, (device, SimpleNamespace(block_ids=np.array([6]))))
    assert [np.flatnonzero(found).tolist() for found in seen] == [[6]]


def test_what_the_tier_loads_into_a_row_is_complete(marks: tuple[RowMarks, RowMarks]) -> None:
    """vLLM may store a chunk that was loaded to another tier."""
    mine, theirs = marks
    mine.mark(np.array([1, 2]))
    memory = RowMemory(memoryview(np.zeros((ROWS, 128), np.uint8)), {0: [(0, 64)]}, [theirs])
    assert memory.incomplete([0, 2, 1]) == [1, 2]
    memory.copy_in(2, 0, memoryview(bytes(64)))
    assert memory.incomplete([0, 2, 1]) == [2]
    assert memory.incomplete([]) == []


def test_marks_that_are_not_ours_are_refused(tmp_path: Path, marks: tuple[RowMarks, RowMarks]) -> None:
    region = str(tmp_path / "vllm_offload_engine.mmap")
    with pytest.raises(ConfigError, match=r"rank7\.rows cannot be opened"):
        RowMarks.open(region, 7, ROWS)
    with pytest.raises(ConfigError, match="is not a file of 9 bytes"):
        RowMarks.open(region, 0, ROWS + 1)
    os.symlink(marks_path(region, 0), marks_path(region, 1))
    with pytest.raises(ConfigError, match=r"rank1\.rows cannot be opened"):
        RowMarks.open(region, 1, ROWS)


def test_a_chunk_that_one_rank_lacks_blocks_of_is_not_stored(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """And the job succeeds: its other chunks are stored, and vLLM hears of no failure."""
    made = stand([fs_entry(tmp_path / "kv")])
    keys = made.keys("a", 2)
    request = made.request("store", keys)
    output = made.manager.prepare_store(list(keys), request)
    made._transfer(made.device_spec([[0, 1, 2, 3], [4, 5, 6, 7]]), output.store_spec, store=True)
    made.scheduler_spec.kvstore_marks()[1].mark(np.array([compat.row_numbers(output.store_spec)[1]]))
    made.manager.complete_store(set(keys), request)
    made.settle()
    assert made.metrics.total("stores", "incomplete") == 1
    assert made.metrics.total("stores", "stored") == 3
    assert sorted(key.to_engine() for key in record_paths(tmp_path / "kv")) == sorted(set(keys) - {keys[1]})


def test_nothing_is_left_in_shared_memory(stand: Callable[..., Stand], tmp_path: Path) -> None:
    made = stand([fs_entry(tmp_path / "kv")])
    assert not [name for name in os.listdir("/dev/shm") if made.engine_id in name]


# --- which pages are spare ---------------------------------------------------------------------------------------------------------


def kind(name: str, **fields: Any) -> Any:
    """A layer's spec of the class `name`."""
    return type(name, (), fields)()


def spare(
    groups: list[tuple[int, list[Any]]], per_chunk: int, speculative: int = 0, others: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """`spare_pages` of an engine with these groups: tokens of a block, and the spec of each layer."""
    modules: dict[str, Any] = dict(others or {})
    known = []
    for number, (tokens, specs) in enumerate(groups):
        names = tuple(f"{number}.{layer}" for layer in range(len(specs)))
        for name, spec in zip(names, specs, strict=True):
            modules[name] = SimpleNamespace(get_kv_cache_spec=lambda _, spec=spec: spec)
        known.append((number, tokens, names))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=modules),
        speculative_config=SimpleNamespace(num_speculative_tokens=speculative) if speculative else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "spec_facts", lambda spec: SimpleNamespace(groups=tuple(known), blocks_per_chunk=per_chunk))
        patch.setattr(compat, "current_config", lambda spec: config)
        return spare_pages(object())


def boundaries(chunks: list[int], up_to: int) -> Iterator[int]:
    """Where a hit can end: at a chunk of any group, or one token before it."""
    ends = {end for tokens in chunks for end in range(tokens, up_to + 1, tokens)}
    return iter(sorted(ends | {end - 1 for end in ends}))


@given(
    window=st.integers(1, 200),
    tokens=st.sampled_from([8, 16, 32]),
    per_chunk=st.integers(2, 6),
    other=st.sampled_from([8, 16, 32]),
    speculative=st.integers(0, 4),
)
def test_no_reader_sees_a_spare_page(window: int, tokens: int, per_chunk: int, other: int, speculative: int) -> None:
    """For any window and chunk, against the definition: whoever resumes at `end` sees tokens from end - window + 1 on."""
    sliding = kind("SlidingWindowSpec", sliding_window=window)
    pages, full = spare([(tokens, [sliding, sliding]), (other, [FullAttentionSpec()])], per_chunk, speculative)
    assert full == 0
    chunk = tokens * per_chunk
    start = 5 * math.lcm(chunk, other * per_chunk)
    seen = [
        max(0, end - window + 1 - speculative)
        for end in boundaries([chunk, other * per_chunk], start + chunk)
        if start < end <= start + chunk
    ]
    assert start + pages * tokens <= max(start, min(seen)), "a reader needs a page that is called spare"
    # And no page is called needed for nothing, where one chunk size makes it easy to say: that would cost reuse.
    if other == tokens:
        assert start + (pages + 1) * tokens > min(seen)


@pytest.mark.parametrize(
    ("groups", "per_chunk", "expected"),
    [
        ([(32, [kind("SlidingWindowSpec", sliding_window=64)])], 4, (2,)),
        ([(32, [kind("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=1)])], 4, (1,)),
        ([(32, [kind("SlidingWindowSpec", sliding_window=64), FullAttentionSpec()])], 4, (0,)),
        ([(32, [kind("ChunkedLocalAttentionSpec", attention_chunk_size=32)])], 4, (3,)),
        ([(32, [FullAttentionSpec()])], 4, (0,)),
        ([(64, [kind("MambaSpec", mamba_cache_mode="align")]), (16, [FullAttentionSpec()])], 4, (3, 0)),
        ([(64, [kind("MambaSpec", mamba_cache_mode="all")]), (16, [FullAttentionSpec()])], 4, (0, 0)),
        ([(32, [kind("SlidingWindowSpec", sliding_window=64)])], 1, (0,)),
    ],
    ids=["window", "retained", "mixed", "chunked", "full", "aligned state", "state", "one block"],
)
def test_spare_pages_by_kind(groups: list[tuple[int, list[Any]]], per_chunk: int, expected: tuple[int, ...]) -> None:
    assert spare(groups, per_chunk) == expected


def test_caches_that_are_not_offloaded_may_end_a_hit_anywhere() -> None:
    groups = [(32, [kind("SlidingWindowSpec", sliding_window=64)])]
    assert spare(groups, 4, others={"experts": object()}) == (2,)
    assert spare(groups, 4, others={"more": Layer()}) == (0,)
    shared = Layer()
    shared.kv_sharing_target_layer_name = "0.0"  # type: ignore[attr-defined]
    assert spare(groups, 4, others={"more": shared}) == (2,)


# --- a real engine -----------------------------------------------------------------------------------------------------------------


def test_a_chunk_stored_late_is_not_served_to_another_engine(models: ModelShop, start: Callable[..., Engine], tmp_path: Path) -> None:
    """vLLM's host memory is full for the first request's first 31 steps, while others take the blocks that its window dropped.

    When its last chunk is stored at last, three of its four blocks are gone in the groups with a window, and a reader needs two. Stored
    with zeros in their place it would verify, and the other engine would answer with other tokens.
    """
    model = models("gemma")
    asked = prompts(40, 390)
    options = {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 512, "max_num_seqs": 2, "max_model_len": 512}
    extra = {"blocks_per_chunk": 4}
    plain = start(model, None, **options)
    expected = plain.ask(asked[:1])
    plain.stop()

    first = start(model, fs_entry(tmp_path / "kv"), extra=extra, **options)
    prepare, seen = first.manager.prepare_store, []

    def full_at_first(keys: Any, context: Any) -> Any:
        # The long request, whichever comes first: look-ups that are still open put requests off.
        if context.req_id.split("-")[0] == "0" and len(seen) < 31:
            seen.append(context.req_id)
            return None
        return prepare(keys, context)

    first.manager.prepare_store = full_at_first
    first.generate(asked, [80] + [2] * 39)
    first.settle()
    assert len(seen) == 31
    assert first.metrics.total("stores", "incomplete") == 3, "the groups with a window have one each"
    first.stop()

    second = start(model, fs_entry(tmp_path / "kv"), extra=extra, **options)
    answers = second.ask([asked[0], asked[20]])
    second.stop()
    assert answers[0].differs(expected[0]) == 0.0
    # What is whole is served.
    assert answers[1].reused == 384
