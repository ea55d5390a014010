from __future__ import annotations

import math

import pytest
import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from dense_models import segmenter
from vitrim.core.attention import Attention, KnownMap
from vitrim.core.plan import Layer
from vitrim.methods.vid_tldr import saliency, sharpness

BARE = {"class_token": False, "global_pool": "avg", "fc_norm": False}


@golden.cases([("new/vidtldr_r", (12, 9, 6)), ("new/vidtldr_p49_ratio", (0.25, 0.2))], "r")
def test_vectors(ref: golden.Reference, r: tuple[float, ...]) -> None:
    learned.check_dense(ref, **BARE)
    model = golden.vit(ref, **BARE)
    reduction = vitrim.reduce_(model, vitrim.VidTLDR(r=r, head="tokens"), record=True)
    places, weights = {}, {}

    def look(m, args, out):
        x, attention, state = args
        places[m.layer.depth] = out.target(x.shape[1])
        size = state.size if not state.uniform else None
        weights[m.layer.depth] = saliency(sharpness(attention, size))

    for block in model.blocks[: len(r)]:
        block.reducer.register_forward_hook(look)
    logits, _ = learned.forward(model, golden.images(ref))
    ref.check("logits", logits)
    ref.check("tokens_per_block", reduction.tokens_per_block, torch.Tensor.tolist)
    ref.check("source", reduction.state.source)
    ref.check("size", reduction.state.size)
    for block, key in learned.keys(ref, "place").items():
        ref.check(key, places[block])
    for block, key in learned.keys(ref, "saliency").items():
        ref.check(key, weights[block])
    learned.check_float32(ref, model)


def test_the_bias_by_size_is_taken_out_of_the_map_and_no_other() -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64)
    size, position = torch.rand(2, 7, dtype=torch.float64) + 0.5, torch.randn(1, 3, 7, 7, dtype=torch.float64)
    attention = Attention(q, k, v, 0.5, bias=position + size.log()[:, None, None, :])
    mean = (0.5 * q @ k.mT + position).softmax(-1).mean(1)
    expected = (mean * mean.log()).sum(-1) + math.log(7)
    torch.testing.assert_close(sharpness(attention, size), expected)
    torch.testing.assert_close(sharpness(KnownMap.of(attention), size), expected)
    assert not torch.allclose(sharpness(attention, None), expected)


def test_float32_tells_apart_entropies_that_are_all_close_to_the_largest() -> None:
    q, k = 0.1 * torch.randn(2, 2, 3, 36, 8, dtype=torch.float64)
    mean = (q @ k.mT).softmax(-1).mean(1)
    expected = saliency((mean * mean.log()).sum(-1))
    found = saliency(sharpness(Attention(q.float(), k.float(), k.float(), 1.0), None))
    torch.testing.assert_close(found, expected.float(), atol=1e-3, rtol=0)


def test_an_attention_of_exactly_zero_and_a_constant_saliency_are_no_nan() -> None:
    q = torch.zeros(1, 1, 3, 2)
    attention = Attention(q, q, q, 1.0, bias=torch.tensor([0.0, -torch.inf, 0.0]).expand(1, 1, 1, 3))
    assert sharpness(attention, None).isfinite().all()
    assert saliency(torch.full((2, 5), -3.0)).tolist() == [[1.0] * 5] * 2


def test_saliency_in_plain_lines() -> None:
    sharp = -torch.rand(4, 9, dtype=torch.float64)
    for row, found in zip(sharp.tolist(), saliency(sharp).tolist(), strict=True):
        e = [value - min(row) for value in row]
        e = [value / max(e) for value in e]
        mean = sum(e) / len(e)
        above = [value - mean for value in e]
        largest = max(above)
        assert found == pytest.approx([0.0 if value < 0 else value / largest for value in above])


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_background_vanishes_in_what_it_joins_and_leaves_no_size(prefix: int) -> None:
    x = torch.randn(2, prefix + 8, 4, dtype=torch.float64)
    q, k = torch.randn(2, 2, 2, prefix + 8, 3, dtype=torch.float64)
    attention = Attention(q, k, k, 1.0)
    state = vitrim.TokenState.start(x, num_prefix=prefix)
    size = torch.rand(2, prefix + 8, dtype=torch.float64) + 0.5
    size[:, :prefix] = 1.0
    state = vitrim.core.tokens.changed(state, size=size, uniform=False)
    config = vitrim.VidTLDR(r=[3], proportional=False)
    reducer = tiny.reducer(config, Layer(0, 4, 4, 2, 0, prefix, prefix > 0, (2, 4)))
    tokens, after = reducer.reduce("between", x, attention, state)
    weight = saliency(sharpness(attention, None)[:, prefix:])
    hard = reducer(x, attention, state)
    assert (weight == 0).any()
    for image in range(2):
        for place in range(tokens.shape[1]):
            anchor = int(hard.anchor[image, place])
            mass, total = size[image, anchor], size[image, anchor] * x[image, anchor]
            for source in hard.moved[image][hard.into[image] == place].tolist():
                own = size[image, source] * weight[image, source - prefix]
                mass, total = mass + own, total + own * x[image, source]
            torch.testing.assert_close(tokens[image, place], total / mass)
            torch.testing.assert_close(after.size[image, place], mass)
    assert (hard.moved >= prefix).all()
    assert after.source.min() >= 0


def test_what_a_head_that_averages_counts() -> None:
    images, found = tiny.images().double(), {}
    for head in ("patches", "tokens"):
        model = tiny.shaken(tiny.vit(class_token=False, global_pool="avg")()).double()
        reduction = vitrim.reduce_(model, vitrim.VidTLDR(r=0.3, head=head))
        with torch.no_grad():
            features = model.forward_features(images)
        found[head] = features.shape[1]
        assert features.shape[1] == (36 if head == "patches" else reduction.state.num_tokens)
    assert found["tokens"] < 36


def test_a_head_that_reads_every_patch_cannot_get_the_tokens_that_are_left() -> None:
    model = segmenter("vit")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"vid_tldr hands out the tokens that are left, as head=tok"):
        vitrim.reduce_(model, "vid_tldr:head=tokens")
    vitrim.reduce_(model, "vid_tldr")


def test_amounts() -> None:
    assert vitrim.VidTLDR().counts(100, 12)[:5] == [80, 64, 52, 42, 42]
    assert vitrim.VidTLDR(r=0.25).counts(100, 12)[:5] == [75, 57, 43, 33, 33]
    assert vitrim.VidTLDR(r=[10, 0.5], blocks=[3, 1]).counts(100, 4) == [100, 90, 90, 45]
    assert vitrim.VidTLDR(r=90).counts(100, 4) == [50, 50, 50, 50]


def test_tokens_in_half_precision_pair_as_the_same_tokens_in_float32() -> None:
    x = torch.randn(2, 64, 16).bfloat16()
    attention = Attention(*torch.randn(3, 2, 2, 64, 4), 1.0)
    reducer = tiny.reducer(vitrim.VidTLDR(r=[20]), Layer(0, 4, 16, 2, 0, 0, False, (8, 8)))
    half, full = (reducer(t, attention, vitrim.TokenState.start(t, num_prefix=0)) for t in (x, x.float()))
    assert torch.equal(half.anchor, full.anchor)
    assert torch.equal(half.moved, full.moved)
    assert torch.equal(half.into, full.into)
