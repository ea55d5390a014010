from __future__ import annotations

import math

import pytest
import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.attention import Attention
from vitrim.core.plan import Layer
from vitrim.methods.saint import redundancy


@golden.cases([("new/saint_t30", 3), ("new/saint_p49_t30", 2)], "blocks")
def test_vectors(ref: golden.Reference, blocks: int) -> None:
    learned.check_dense(ref)
    model = golden.vit(ref)
    config = vitrim.SAINT(threshold=(0.3,) * blocks, variant="published")
    reduction = vitrim.reduce_(model, config, record=True)
    places: dict[int, torch.Tensor] = {}
    for block in range(blocks):
        model.blocks[block].reducer.register_forward_hook(
            lambda m, args, out, block=block: places.__setitem__(block, out.target(args[0].shape[1]))
        )
    logits, tokens = learned.forward(model, golden.images(ref))
    ref.check("logits", logits)
    ref.check("tokens_per_block", reduction.tokens_per_block, torch.Tensor.tolist)
    ref.check("cls_per_block", tokens)
    ref.check("source", reduction.state.source)
    for block, key in learned.keys(ref, "place").items():
        ref.check(key, places[block])
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in golden.images(ref)])
    ref.check("logits_batch1", alone)
    learned.check_float32(ref, model)
    # by default an image in a batch does as it does alone
    model = golden.vit(ref)
    vitrim.reduce_(model, vitrim.SAINT(threshold=0.3, blocks=range(blocks)))
    ref.check("logits_batch1", learned.forward(model, golden.images(ref))[0])


def plain(keys: torch.Tensor, threshold: float, gamma: float, least: int, r: int | None = None) -> list[int]:
    """The patches of one image in their new order, from unit keys (P, d), in plain lines."""
    score, many = {}, 0
    for i in range(0, len(keys), 2):
        cosines = [float(keys[i] @ keys[j]) for j in range(1, len(keys), 2)]
        alike = [cosine for cosine in cosines if cosine >= threshold]
        many += len(alike) >= least
        if alike:
            score[i] = len(alike) * math.exp(gamma * (sum(alike) / len(alike) - threshold))
        else:
            score[i] = sum(cosines) / len(cosines)
    r = many if r is None else r
    if r == 0:
        return list(range(len(keys)))
    return [*sorted(score, key=lambda i: -score[i])[r:], *range(1, len(keys), 2)]


def state_of(keys: torch.Tensor, real: list[int] | None = None) -> tuple[torch.Tensor, Attention, vitrim.TokenState]:
    """Tokens of which the first few are ``real``, with a class token in front."""
    batch, patches, dim = keys.shape
    x = torch.arange(1.0 + patches).expand(batch, -1).unsqueeze(2).double()
    state = vitrim.TokenState.start(x, num_prefix=1)
    if real is not None:
        mask = torch.arange(1 + patches) <= torch.tensor(real)[:, None]
        state = vitrim.core.tokens.changed(state, mask=mask)
    keys = torch.cat([torch.ones(batch, 1, dim).double(), keys], dim=1).unsqueeze(1)
    return x, Attention(keys, keys, keys, 1.0), state


@pytest.mark.parametrize("real", [None, [11, 8, 5]])
def test_each_image_drops_its_own_number(real: list[int] | None) -> None:
    keys = torch.nn.functional.normalize(torch.randn(3, 11, 3).double(), dim=-1)
    config = vitrim.SAINT(threshold=0.5, neighbours=2, gamma=3.0, blocks=[0])
    reducer = tiny.reducer(config, Layer(0, 2, 1, 1, 0, 1, True, (1, 11)))
    x, attention, state = state_of(keys, real)
    tokens, after = reducer(x, attention, state).apply(x, state)
    lengths = []
    for image, count in enumerate(real or [11] * 3):
        expected = plain(keys[image, :count], 0.5, 3.0, 2)
        lengths.append(len(expected))
        assert tokens[image, 1 : 1 + len(expected), 0].tolist() == [1.0 + patch for patch in expected]
        if after.mask is not None:
            assert after.mask[image].tolist() == [place <= len(expected) for place in range(tokens.shape[1])]
    assert len(set(lengths)) > 1
    assert tokens.shape[1] == 1 + max(lengths)


def test_an_image_that_drops_nothing_keeps_its_order_beside_one_that_does() -> None:
    different = torch.eye(8).double()
    alike = torch.ones(8, 8).double()
    reducer = tiny.reducer(vitrim.SAINT(neighbours=2, blocks=[0]), Layer(0, 2, 1, 1, 0, 1, True, (2, 4)))
    x, attention, state = state_of(torch.stack([different, alike]))
    _, after = reducer(x, attention, state).apply(x, state)
    assert after.position[0].tolist() == list(range(9))
    assert after.mask.sum(1).tolist() == [9, 5]
    x, attention, state = state_of(different[None])
    assert reducer(x, attention, state) is None


def test_the_published_amount_is_the_mean_of_the_batch_and_the_same_for_all() -> None:
    keys = torch.nn.functional.normalize(torch.randn(3, 12, 3).double(), dim=-1)
    own = [12 - len(plain(one, 0.4, 10.0, 2)) for one in keys]
    r = sum(own) // 3
    assert 0 < r < max(own)
    config = vitrim.SAINT(threshold=0.4, neighbours=2, blocks=[0], variant="published")
    reducer = tiny.reducer(config, Layer(0, 2, 1, 1, 0, 1, True, (3, 4)))
    x, attention, state = state_of(keys)
    tokens, after = reducer(x, attention, state).apply(x, state)
    assert after.mask is None
    for image in range(3):
        assert tokens[image, 1:, 0].tolist() == [1.0 + patch for patch in plain(keys[image], 0.4, 10.0, 2, r)]


def test_fixed_numbers_rank_as_the_thresholds_do() -> None:
    keys = torch.nn.functional.normalize(torch.randn(2, 9, 3).double(), dim=-1)
    config = vitrim.SAINT(threshold=0.4, r=[3])
    reducer = tiny.reducer(config, Layer(0, 2, 1, 1, 0, 1, True, (3, 3)))
    x, attention, state = state_of(keys)
    tokens, _ = reducer(x, attention, state).apply(x, state)
    for image in range(2):
        assert tokens[image, 1:, 0].tolist() == [1.0 + patch for patch in plain(keys[image], 0.4, 10.0, 5, 3)]
    assert vitrim.SAINT(r=[40, 300]).counts(196, 4) == [156, 78, 78, 78]  # no more than the even places


def test_freezing_takes_the_mean_counts_of_the_blocks_that_drop() -> None:
    frozen = vitrim.SAINT(threshold=0.6, variant="published").frozen(36, [30.4, 25.6, 25.6, 25.6])
    assert frozen == vitrim.SAINT(threshold=0.6, r=[6, 4])
    assert not frozen.is_adaptive()
    assert frozen.obstacle() is None
    assert frozen.counts(36, 4) == [30, 26, 26, 26]


def test_a_list_acts_from_the_first_block_on_and_a_threshold_of_1_drops_nothing() -> None:
    assert vitrim.SAINT().stages(5) == (0, 1)
    assert vitrim.SAINT(threshold=[0.5]).stages(5) == (0,)
    assert vitrim.SAINT(threshold=[0.5, 0.6], blocks=[3, 1]).at(3, 5) == 0.6
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "saint:threshold=[1,0.5],neighbours=1", record=True)
    model(tiny.images().expand(-1, -1, -1, -1) * 0)  # all patches alike, to rounding
    counts = reduction.tokens_per_block
    assert counts[0] == 37
    assert counts[1] < 37


def test_the_largest_weight_still_orders_what_resembles_all() -> None:
    similarity = torch.tensor([[[1.0] * 999, [0.999] * 999]])
    largest = max(entry.le for entry in vitrim.SAINT.model_fields["gamma"].metadata if hasattr(entry, "le"))
    score, _ = redundancy(similarity, -1.0, largest, torch.ones(1, 999, dtype=torch.bool))
    assert score.isfinite().all()
    assert score[0, 0] > score[0, 1]


@pytest.mark.parametrize(("first", "then"), [("0.3", [0.3]), ("[0.3]", [0.3, 0.2]), ("[0.3,0.2]", [0.3])])
def test_a_list_for_other_blocks_is_refused_at_run_time(first: str, then: list[float]) -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, f"saint:threshold={first},neighbours=1")
    before = model(tiny.images())
    with pytest.raises(vitrim.VitrimError, match=r"acts in blocks \[0.*\] and the model was reduced for \[0"):
        reduction.set(threshold=then)
    assert torch.equal(model(tiny.images()), before)


def test_a_cosine_of_the_threshold_itself_counts() -> None:
    _, alike = redundancy(torch.tensor([[[0.5, 0.25]]]), 0.5, 10.0, torch.ones(1, 2, dtype=torch.bool))
    assert alike.item() == 1


def test_a_threshold_of_1_drops_not_even_what_is_the_same() -> None:
    x, attention, state = state_of(torch.eye(8).double()[:1].expand(2, 8, 8))  # products of exactly 1
    for threshold, drops in ((1.0, False), (0.999, True)):
        reducer = tiny.reducer(vitrim.SAINT(threshold=threshold, neighbours=2), Layer(0, 2, 1, 1, 0, 1, True, (2, 4)))
        assert (reducer(x, attention, state) is not None) == drops


def test_padding_counts_neither_as_alike_nor_in_the_mean() -> None:
    similarity = torch.tensor([[[0.1, 0.3, 0.9, 0.8], [0.6, 0.7, 0.9, 0.8]]])
    score, alike = redundancy(similarity, 0.5, 10.0, torch.tensor([[True, True, False, False]]))
    assert score[0].tolist() == pytest.approx([(0.1 + 0.3) / 2, 2 * math.exp(10 * (0.65 - 0.5))], rel=1e-5)
    assert alike[0].tolist() == [0, 2]
