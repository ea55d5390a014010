"""Tokens keep their own position: rotary angles of DINOv3, relative bias of BEiT. And sizes weigh in attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import tiny
import vitrim
from vitrim.core.assignment import merge, prune
from vitrim.core.tokens import TokenState, take

PREFIX, PATCHES = 5, 36  # a class token and four registers; 6 x 6 patches


def dinov3() -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """A reduced layer, its dense twin, and the tables of cosines and sines."""
    model, twin = (tiny.HOSTS["hf_dinov3"]().double() for _ in range(2))
    vitrim.reduce_(model, "none")
    return tiny.blocks(model)[1], tiny.blocks(twin)[1], twin.rope_embeddings(tiny.images().double())


LAYER, DENSE, TABLES = dinov3()
TOKENS = torch.randn(2, PREFIX + PATCHES, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

patterns = st.lists(st.integers(0, PATCHES - 1), unique=True, max_size=PATCHES - 1)


@given(removed=patterns, other=patterns, order=st.randoms(use_true_random=False))
@example(removed=[0, 1], other=[34, 35], order=None)
@example(removed=[0, 1, 2, 3, 4], other=[5, 11, 17, 23, 29], order=None)
@example(removed=list(range(7)), other=list(range(0, 28, 4)), order=None)
def test_survivors_keep_their_rotary_angles(removed: list[int], other: list[int], order: Any) -> None:
    """Two, five and seven removed behind five prefix tokens are the counts that a wrong host gets through or not."""
    keeps = []
    for gone in (removed, other):
        keep = [patch for patch in range(PATCHES) if patch not in gone]
        if order is not None:
            order.shuffle(keep)
        keeps.append(keep)
    fewest = min(map(len, keeps))
    index = torch.tensor([keep[:fewest] for keep in keeps])
    state = TokenState.start(TOKENS, PREFIX)
    with torch.no_grad():
        full = LAYER.project(TOKENS, state, None, TABLES)
        assignment = prune(state, index)
        tokens, after = assignment.apply(TOKENS, state)
        left = LAYER.project(tokens, after, None, TABLES)
        out, _ = LAYER.step(tokens, after, TABLES)
        for image, keep in enumerate(assignment.anchor):
            for name in ("q", "k", "v", "k_raw"):
                torch.testing.assert_close(getattr(left, name)[image], getattr(full, name)[image][:, keep])
            # the host's own layer, given the rows of its tables that belong to the survivors
            rows = [table[index[image]] for table in TABLES]
            own = DENSE(tokens[image : image + 1], position_embeddings=rows)
            torch.testing.assert_close(out[image], own[0], atol=1e-10, rtol=1e-10)


def test_a_merged_token_is_rotated_by_the_angles_of_its_anchor() -> None:
    state = TokenState.start(TOKENS, PREFIX)
    keep = torch.arange(PATCHES - 1, 1, -1).expand(2, -1)
    assignment = merge(state, keep, torch.tensor([[0, 1]] * 2), torch.tensor([[3, 3]] * 2))
    with torch.no_grad():
        tokens, after = assignment.apply(TOKENS, state)
        attention = LAYER.project(tokens, after, None, TABLES)
        laid_out = torch.zeros_like(TOKENS)
        laid_out[torch.arange(2)[:, None], assignment.anchor] = tokens
        expected = LAYER.project(laid_out, state, None, TABLES).k
    torch.testing.assert_close(attention.k, expected[:, :, assignment.anchor[0]])


def test_class_token_rows_of_the_last_block_are_exact() -> None:
    state = TokenState.start(TOKENS, PREFIX)
    with torch.no_grad():
        rows = LAYER.project(TOKENS, state, 1, TABLES)
        full = LAYER.project(TOKENS, state, None, TABLES)
    torch.testing.assert_close(rows.output(), full.output()[:, :, :1])


FAMILIES = ("hf_vit_model", "hf_dinov2", "hf_clip", "hf_siglip", "hf_dinov3", "hf_beit", "hf_beit_model")


@pytest.mark.parametrize("host", FAMILIES)
def test_attention_in_proportion_to_size_equals_duplicated_tokens(host: str) -> None:
    """The last layer of a model whose tokens have merged, against the host's own layer on the un-merged tokens."""
    model, twin = tiny.HOSTS[host]().double(), tiny.HOSTS[host]().double()
    twin.set_attn_implementation("sdpa")  # written out, the library's softmax is in float32
    seen: dict[str, Any] = {}
    last = tiny.blocks(twin)[-1]
    hook = last.register_forward_pre_hook(lambda m, a, k: seen.update(k, args=a), with_kwargs=True)
    reduction = vitrim.reduce_(model, "tome:r=[9,9,5,0]")
    images = tiny.images().double()
    with torch.no_grad():
        twin(images)
        hook.remove()
        *_, before, after = model(images, output_hidden_states=True).hidden_states
        state = reduction.state
        own = {key: value for key, value in seen.items() if key != "args"}
        for image in range(len(images)):
            index = state.position[image][state.source[image]]  # the anchor of every input token
            tokens = before[image : image + 1]
            if host == "hf_dinov3":
                patches = index[state.num_prefix :] - state.num_prefix
                own["position_embeddings"] = [table[patches] for table in seen["position_embeddings"]]
            if host.startswith("hf_beit"):
                expected = beit_layer(last, tokens, index, own)
            else:
                expected = last(tokens, *seen["args"][1:], **own)
            torch.testing.assert_close(after[image : image + 1], expected, atol=1e-10, rtol=1e-10)


def beit_layer(layer: Any, tokens: Tensor, index: Tensor, own: dict[str, Any]) -> Tensor:
    """The host's layer with the biases between the tokens ``index``, handed over as the mask it adds to its own."""
    window = tuple(side // layer.patch_size for side in own["resolution"])
    bias = layer.relative_position_bias(window, dim_size=tokens.shape[1])
    shared = own["attention_mask"]
    wanted = (bias if shared is None else bias + shared)[:, :, index][:, :, :, index]
    return layer(tokens, **{**own, "attention_mask": wanted - bias})


def test_beit_bias_follows_the_tokens() -> None:
    model = tiny.HOSTS["hf_beit"]().double()
    vitrim.reduce_(model, "none")
    layer, images = tiny.blocks(model)[1], tiny.images()
    tokens = TOKENS[:, : PATCHES + 1]
    state = TokenState.start(tokens, 1)
    keep = torch.stack([torch.randperm(PATCHES, generator=torch.Generator().manual_seed(s))[:20] for s in (1, 2)])
    given = (None, False, images.shape[2:])
    with torch.no_grad():
        full = layer.project(tokens, state, None, given)
        assignment = prune(state, keep)
        left = layer.project(take(tokens, assignment.anchor), assignment.advance(tokens, state), None, given)
    for image, anchor in enumerate(assignment.anchor):
        torch.testing.assert_close(left.bias[image], full.bias[0][:, anchor][:, :, anchor])
