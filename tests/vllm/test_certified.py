"""Known values through the operations by which vLLM writes its caches: every element is where the list of certified caches says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as functional
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from kvstore_sdk.layout import (
    AttentionShape,
    CanonicalShape,
    LatentShape,
    Section,
    StatePart,
    StateShape,
    Topology,
    payload_bytes,
    runs,
    write_runs,
)

BLOCKS, TOKENS = 3, 32


def distinct(*shape: int, dtype: torch.dtype, start: int = 1) -> torch.Tensor:
    """Elements no two of which are equal, so that none can be taken for another."""
    count = math.prod(shape)
    if dtype == torch.float32:
        return (torch.arange(count, dtype=torch.float32) + start).view(shape)
    assert start + count < 0x7C00, "these would not be finite in float16"
    return (torch.arange(count, dtype=torch.int16) + start).view(dtype).view(shape)


def write_attention(keys: torch.Tensor, values: torch.Tensor, isa: str, kv_cache_dtype: str = "auto", tokens: int = TOKENS) -> torch.Tensor:
    """A cache as the CPU backend has it, written as `CPUAttentionBackendImpl.do_kv_cache_update` does: token i into slot i."""
    count, heads, size = keys.shape
    dtype = keys.dtype if kv_cache_dtype == "auto" else torch.uint8
    cache = torch.zeros(count // tokens, heads, tokens, 2 * size, dtype=dtype)
    key_cache, value_cache = cache.view(count // tokens, heads, 2 * tokens, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(count), isa, 1.0, 1.0, kv_cache_dtype)
    return cache


def where_ktv_says(cache: torch.Tensor, size: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every token, each element taken from the place that `lbh-ktv` names."""
    blocks, heads = cache.shape[:2]
    flat = cache.reshape(blocks, heads, -1)
    token, head, dim = torch.meshgrid(torch.arange(blocks * tokens), torch.arange(heads), torch.arange(size), indexing="ij")
    block, place = token // tokens, token % tokens
    return flat[block, head, dim * tokens + place], flat[block, head, size * tokens + place * size + dim]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("isa", "size"), [("vec", 32), ("vec", 64), ("vec16", 32), ("vec16", 80)])
def test_keys_lie_transposed_in_a_block_and_values_do_not(isa: str, size: int, dtype: torch.dtype) -> None:
    keys, values = distinct(BLOCKS * TOKENS, 2, size, dtype=dtype), -distinct(BLOCKS * TOKENS, 2, size, dtype=dtype)
    found = where_ktv_says(write_attention(keys, values, isa), size)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


@pytest.mark.parametrize("tokens", [16, 48])
def test_blocks_that_only_vec16_takes_lie_the_same_way(tokens: int) -> None:
    keys, values = distinct(2 * tokens, 2, 32, dtype=torch.bfloat16), -distinct(2 * tokens, 2, 32, dtype=torch.bfloat16)
    found = where_ktv_says(write_attention(keys, values, "vec16", tokens=tokens), 32, tokens)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_lies_the_same_way(name: str, dtype: torch.dtype) -> None:
    # Eight bits tell few elements apart: three passes with other periods do, since together these repeat after 8,085 elements.
    for period in (11, 15, 49):
        keys = (
            torch.tensor([1.0, 2, 3, 4, 5, 6, 7])[(torch.arange(BLOCKS * TOKENS * 2 * 32) % period) % 7].view(-1, 2, 32).to(torch.bfloat16)
        )
        found = where_ktv_says(write_attention(keys, -keys, "vec", name), 32)
        assert torch.equal(found[0].view(dtype).float(), keys.float())
        assert torch.equal(found[1].view(dtype).float(), -keys.float())


def where_amx_says(cache: torch.Tensor, size: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """As `where_ktv_says`, from the places that `lbh-amx` names."""
    blocks, heads = cache.shape[:2]
    flat = cache.reshape(blocks, heads, -1)
    token, head, dim = torch.meshgrid(torch.arange(blocks * tokens), torch.arange(heads), torch.arange(size), indexing="ij")
    block, place = token // tokens, token % tokens
    keys = place // 16 * 16 * size + dim // 2 * 32 + place % 16 * 2 + dim % 2
    values = size * tokens + dim // 16 * 16 * tokens + place // 2 * 32 + dim % 16 * 2 + place % 2
    return flat[block, head, keys], flat[block, head, values]


@pytest.mark.parametrize("tokens", [32, 64, 96])
@pytest.mark.parametrize("size", [32, 64, 96, 128])
def test_amx_packs_pairs_of_a_key_and_pairs_of_tokens_of_values(size: int, tokens: int) -> None:
    keys, values = distinct(2 * tokens, 1, size, dtype=torch.bfloat16), -distinct(2 * tokens, 1, size, dtype=torch.bfloat16)
    found = where_amx_says(write_attention(keys, values, "amx", tokens=tokens), size, tokens)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def test_amx_keeps_the_same_shape_in_another_order() -> None:
    """Why names decide and shapes do not: same shape, same strides, same `kv_cache_layout`, other bytes."""
    keys, values = distinct(BLOCKS * TOKENS, 2, 64, dtype=torch.bfloat16), -distinct(BLOCKS * TOKENS, 2, 64, dtype=torch.bfloat16)
    vec, amx = write_attention(keys, values, "vec"), write_attention(keys, values, "amx")
    assert (vec.shape, vec.stride()) == (amx.shape, amx.stride())
    # All is there, but not where `vec` has it.
    assert torch.equal(vec.flatten().float().sort().values, amx.flatten().float().sort().values)
    found = where_ktv_says(amx, 64)
    assert not torch.equal(found[0], keys)
    assert not torch.equal(found[1], values)


def latents() -> tuple[torch.Tensor, torch.Tensor]:
    return distinct(40, 512, dtype=torch.bfloat16), -distinct(40, 1, 64, dtype=torch.bfloat16)


def write_with_cpu_mla(cache: torch.Tensor, slots: torch.Tensor) -> None:
    latent, rope = latents()
    CPUMLAImpl.do_kv_cache_update(SimpleNamespace(), latent, rope, cache, slots, "auto", torch.ones(1))


def write_with_amx_mla(cache: torch.Tensor, slots: torch.Tensor) -> None:
    latent, rope = latents()
    ops.amx_mla_concat_and_cache(latent, rope.squeeze(1), cache, slots)


@pytest.mark.parametrize("write", [write_with_cpu_mla, write_with_amx_mla])
@pytest.mark.parametrize("tokens", [16, 32])
def test_latents_lie_token_by_token_with_their_rope_part_behind(write: Callable[..., None], tokens: int) -> None:
    cache, slots = torch.zeros(64 // tokens, tokens, 576, dtype=torch.bfloat16), torch.arange(5, 45)
    write(cache, slots)
    latent, rope = latents()
    flat = cache.flatten()
    for number, slot in enumerate(slots.tolist()):
        assert torch.equal(flat[slot * 576 : slot * 576 + 512], latent[number])
        assert torch.equal(flat[slot * 576 + 512 : (slot + 1) * 576], rope[number, 0])
    assert int((flat != 0).sum()) == 40 * 576


KEY_HEADS, VALUE_HEADS, SIZE, KERNEL = 2, 4, 128, 4
STATE_TOKENS = 10


def write_convolution(channels: torch.Tensor, packed: bool) -> torch.Tensor:
    """Three states of [token][channel], of which the sequence writes the middle one, as vLLM's CPU code for GDN does."""
    width = channels.shape[1]
    states, weight = torch.zeros(3, KERNEL - 1, width, dtype=torch.bfloat16), torch.ones(width, KERNEL, dtype=torch.bfloat16)
    ops.causal_conv1d_fwd_cpu(
        x=channels.transpose(0, 1),
        weight=ops.causal_conv1d_weight_pack(weight) if packed else weight,
        bias=None,
        conv_states=states.transpose(1, 2),
        query_start_loc=torch.tensor([0, len(channels)], dtype=torch.int32),
        cache_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        silu_activation=True,
        is_weight_packed=packed,
    )
    return states


@pytest.mark.parametrize("packed", [False, True])
def test_the_convolution_state_has_the_last_tokens_one_after_another(packed: bool) -> None:
    width = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    channels = distinct(STATE_TOKENS, width, dtype=torch.bfloat16)
    states = write_convolution(channels, packed)
    assert torch.equal(states[1], channels[-(KERNEL - 1) :])
    assert not states[0].any()
    assert not states[2].any()


class Recurrence:
    """What goes into the recurrent state, of all heads or of some ranks' share of them."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)
        self.queries, self.keys = (torch.randn(1, STATE_TOKENS, KEY_HEADS, SIZE, generator=source).bfloat16() for _ in range(2))
        self.values = torch.randn(1, STATE_TOKENS, VALUE_HEADS, SIZE, generator=source).bfloat16()
        self.decay = -torch.rand(1, STATE_TOKENS, VALUE_HEADS, generator=source)
        self.beta = torch.rand(1, STATE_TOKENS, VALUE_HEADS, generator=source).bfloat16()

    def write(self, tp: int, rank: int) -> torch.Tensor:
        def share(tensor: torch.Tensor) -> torch.Tensor:
            heads = tensor.shape[2] // tp
            return tensor[:, :, rank * heads : (rank + 1) * heads].contiguous()

        # vLLM takes the state of shape [v dim][k dim] for one of [k dim][v dim] on CPU; here they are equal.
        states = torch.zeros(3, VALUE_HEADS // tp, SIZE, SIZE)
        ops.chunk_gated_delta_rule_cpu(
            query=share(self.queries),
            key=share(self.keys),
            value=share(self.values),
            g=share(self.decay),
            beta=share(self.beta),
            initial_state=states,
            output_final_state=True,
            cu_seqlens=torch.tensor([0, STATE_TOKENS], dtype=torch.int32),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.tensor([1], dtype=torch.int32),
        )
        return states

    def reference(self) -> torch.Tensor:
        """The same in plain arithmetic: [head][k dim][v dim]."""
        keys, state = functional.normalize(self.keys[0].float(), dim=-1), torch.zeros(VALUE_HEADS, SIZE, SIZE)
        for token in range(STATE_TOKENS):
            for head in range(VALUE_HEADS):
                key = keys[token, head * KEY_HEADS // VALUE_HEADS]
                state[head] *= self.decay[0, token, head].exp()
                error = self.values[0, token, head].float() - key @ state[head]
                state[head] += torch.outer(key, error * self.beta[0, token, head].float())
        return state


def test_the_recurrent_state_lies_head_by_head_with_keys_outside() -> None:
    source = Recurrence()
    states, expected = source.write(1, 0), source.reference()
    assert torch.allclose(states[1], expected, atol=0.01)
    assert not torch.allclose(states[1], expected.transpose(1, 2), atol=0.01)
    assert not states[0].any()
    assert not states[2].any()


def tp_parts(tp: int, tensor: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
    return (part.contiguous() for part in tensor.chunk(tp, dim))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def gather(shape: CanonicalShape, tp: int, pages: list[list[bytes]]) -> bytes:
    """The chunk that the ranks write; `pages[rank][block]`."""
    payload = bytearray(payload_bytes(shape))
    for rank in range(tp):
        for run in write_runs(shape, Topology(tp, (1,)), rank):
            for number in range(run.count):
                local, at = run.local_offset + number * run.local_stride, run.offset + number * run.stride
                payload[at : at + run.length] = pages[rank][run.block][local : local + run.length]
    return bytes(payload)


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_with_some_heads_write_the_chunk_of_one_with_all(isa: str, tp: int) -> None:
    """By the kernel's own bytes: what is in (block, head) depends on that block and that head alone."""
    keys, values = distinct(BLOCKS * TOKENS, 4, 32, dtype=torch.bfloat16), -distinct(BLOCKS * TOKENS, 4, 32, dtype=torch.bfloat16)
    shape = AttentionShape(layers=1, blocks=BLOCKS, block_tokens=TOKENS, heads=4, token_head_bytes=2 * 32 * 2)
    shares = zip(tp_parts(tp, keys, 1), tp_parts(tp, values, 1), strict=True)
    pages = [[as_bytes(block) for block in write_attention(k, v, isa)] for k, v in shares]
    assert gather(shape, tp, pages) == as_bytes(write_attention(keys, values, isa))


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_with_some_heads_write_the_state_of_one_with_all(tp: int) -> None:
    channels, source = distinct(STATE_TOKENS, (2 * KEY_HEADS + VALUE_HEADS) * SIZE, dtype=torch.bfloat16), Recurrence()
    sections = channels.split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, VALUE_HEADS * SIZE], dim=1)
    shape = StateShape(
        layers=1,
        parts=(
            StatePart(KERNEL - 1, (Section(KEY_HEADS, 2 * SIZE), Section(KEY_HEADS, 2 * SIZE), Section(VALUE_HEADS, 2 * SIZE))),
            StatePart(1, (Section(VALUE_HEADS, 4 * SIZE * SIZE),)),
        ),
    )
    pages = []
    for rank in range(tp):
        mine = torch.cat([section.chunk(tp, 1)[rank] for section in sections], dim=1)
        pages.append([as_bytes(write_convolution(mine, packed=False)[1]) + as_bytes(source.write(tp, rank)[1])])
    assert gather(shape, tp, pages) == as_bytes(write_convolution(channels, packed=False)[1]) + as_bytes(source.write(1, 0)[1])


def test_ranks_with_the_same_latents_write_the_chunk_of_one() -> None:
    cache = torch.zeros(4, 16, 576, dtype=torch.bfloat16)
    write_with_cpu_mla(cache, torch.arange(5, 45))
    shape = LatentShape(layers=1, blocks=4, block_tokens=16, token_bytes=576 * 2)
    pages = [as_bytes(block) for block in cache]
    assert gather(shape, 2, [pages, pages]) == as_bytes(cache)
    assert len(runs(shape, Topology(2, (1,)), 1)) == 4
