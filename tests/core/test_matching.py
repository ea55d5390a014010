from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.attention import Attention
from vitrim.core.matching import (
    _lookup,
    alternate_similarity,
    alternate_split,
    best_partners,
    merge_alternate,
    merge_most_similar,
    most_similar,
    pair_most_similar,
    split_alternately,
    unit,
)
from vitrim.core.tokens import TokenState


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(prefix=st.integers(0, 5), patches=st.integers(2, 200))
def test_split_is_even_and_odd_places_of_the_whole_sequence(prefix: int, patches: int) -> None:
    places = torch.arange(prefix, prefix + patches)  # the prefix counts
    sources, destinations = alternate_split(prefix)
    assert (places[sources] % 2 == 0).all()
    assert (places[destinations] % 2 == 1).all()
    assert len(places[sources]) + len(places[destinations]) == patches


@given(batch=st.integers(1, 3), sources=st.integers(1, 20), destinations=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_best_partner_is_the_nearest_by_cosine(batch: int, sources: int, destinations: int, seed: int) -> None:
    a, b = draw(seed, batch, sources, 5), draw(seed + 1, batch, destinations, 5)
    best, partner = best_partners(unit(a), unit(b))
    assert best.shape == partner.shape == (batch, sources)
    for image in range(batch):
        for source in range(sources):
            cosine = [
                float(a[image, source] @ row / (a[image, source].norm() * row.norm())) for row in b[image].unbind()
            ]
            assert float(best[image, source]) == pytest.approx(max(cosine), abs=1e-12)
            assert cosine[int(partner[image, source])] == pytest.approx(max(cosine), abs=1e-12)


@given(batch=st.integers(1, 3), count=st.integers(1, 12), padding=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_padding_is_nobodys_partner(batch: int, count: int, padding: int, seed: int) -> None:
    a, b = draw(seed, batch, 7, 5), draw(seed + 1, batch, count, 5)
    twins = a[:, :1].expand(batch, padding, 5)  # padding that would be the best of all for the first source
    order = torch.randperm(count + padding, generator=torch.Generator().manual_seed(seed))
    both = torch.cat([b, twins], 1)[:, order]
    real = (order < count).expand(batch, -1)
    best, partner = best_partners(unit(a), unit(both), real)
    expected, among_real = best_partners(unit(a), unit(b))
    torch.testing.assert_close(best, expected)
    assert real.gather(1, partner).all()
    assert torch.equal(order[partner], among_real)


def test_no_gradient_flows_through_the_choice_of_partners() -> None:
    a, b = draw(0, 1, 3, 4).requires_grad_(), draw(1, 1, 3, 4).requires_grad_()
    best, _ = best_partners(a, b)
    assert not best.requires_grad


def test_partners_are_compared_in_full_precision_under_autocast() -> None:
    a, b = unit(draw(0, 2, 30, 16)).float(), unit(draw(1, 2, 40, 16)).float()
    expected = best_partners(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        best, partner = best_partners(a, b)
    assert best.dtype == torch.float32
    assert torch.equal(best, expected[0])
    assert torch.equal(partner, expected[1])


def test_equally_similar_sources_merge_in_order() -> None:
    moved, kept = most_similar(torch.tensor([[0.5, 0.9, 0.5, 0.5, 0.1]]), 3)
    assert moved.tolist() == [[1, 0, 2]]
    assert kept.tolist() == [[3, 4]]


@given(batch=st.integers(1, 3), count=st.integers(1, 60), data=st.data())
def test_most_similar_splits_the_sources(batch: int, count: int, data: st.DataObject) -> None:
    r = data.draw(st.integers(0, count))
    best = draw(data.draw(st.integers(0, 10**6)), batch, count)
    moved, kept = most_similar(best, r)
    assert moved.shape == (batch, r)
    assert kept.shape == (batch, count - r)
    assert torch.equal(torch.cat([moved, kept], 1).sort(1).values, torch.arange(count).expand(batch, -1))
    assert torch.equal(kept, kept.sort(1).values)
    if 0 < r < count:
        assert (best.gather(1, moved).amin(1) >= best.gather(1, kept).amax(1)).all()


@pytest.mark.parametrize("by_position", [False, True])
@given(prefix=st.integers(0, 3), patches=st.integers(2, 40), data=st.data())
def test_merging_alternate_tokens_puts_each_where_the_list_says(
    by_position: bool, prefix: int, patches: int, data: st.DataObject
) -> None:
    """Lists of Python instead of tensors: even places of the whole sequence are sources, odd ones receive."""
    seed = data.draw(st.integers(0, 10**6))
    places = range(prefix, prefix + patches)
    sources, destinations = [t for t in places if t % 2 == 0], [t for t in places if t % 2 == 1]
    r = data.draw(st.integers(0, len(sources)))
    random = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(len(sources), generator=random) for _ in range(2)])
    partner = torch.randint(len(destinations), (2, r), generator=random)
    state = TokenState.start(torch.zeros(2, prefix + patches, 3), prefix)
    hard = merge_alternate(state, order, partner, by_position=by_position)
    for image in range(2):
        ranked = [sources[i] for i in order[image].tolist()]
        kept = sorted(ranked[r:]) if by_position else ranked[r:]
        layout = [*range(prefix), *kept, *destinations]
        assert hard.anchor[image].tolist() == layout
        assert hard.moved[image].tolist() == ranked[:r]
        assert [layout[i] for i in hard.into[image].tolist()] == [destinations[i] for i in partner[image].tolist()]


@pytest.mark.parametrize("per_image", [False, True])
@given(prefix=st.integers(0, 3), patches=st.integers(2, 60), data=st.data())
def test_merge_puts_kept_sources_first_and_then_every_destination(
    per_image: bool, prefix: int, patches: int, data: st.DataObject
) -> None:
    batch = 2
    seed = data.draw(st.integers(0, 10**6))
    order = torch.randperm(patches, generator=torch.Generator().manual_seed(seed))
    sources, destinations = order[: patches // 2], order[patches // 2 :]
    if per_image:  # other tables for every image, as in a split by size
        sources, destinations = (
            torch.stack([sources, sources.flip(0)]),
            torch.stack([destinations, destinations.flip(0)]),
        )
    r = data.draw(st.integers(0, patches // 2))
    best = draw(seed, batch, patches // 2)
    partner = torch.randint(patches - patches // 2, best.shape, generator=torch.Generator().manual_seed(seed))
    x = draw(seed, batch, prefix + patches, 3)
    state = TokenState.start(x, prefix)
    hard = merge_most_similar(state, sources, destinations, best, partner, r)
    after = hard.advance(x, state)
    for image in range(batch):
        own_sources = (sources[image] if per_image else sources).tolist()
        own_destinations = (destinations[image] if per_image else destinations).tolist()
        ranked = sorted(range(len(own_sources)), key=lambda i: -float(best[image, i]))
        moving, staying = ranked[:r], sorted(ranked[r:])
        layout = [own_sources[i] for i in staying] + own_destinations
        assert hard.anchor[image].tolist() == [*range(prefix), *(place + prefix for place in layout)]
        for i in moving:
            joined = own_destinations[int(partner[image, i])]
            assert after.source[image, own_sources[i] + prefix] == after.source[image, joined + prefix]
    assert (after.size.sum(1) == prefix + patches).all()
    assert after.num_patches == patches - r


# ---- graphs that are exported ----------------------------------------------------------------------------------------


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided while a graph is exported, seen without exporting one."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(compiled, "INSTALLED", False)


@pytest.mark.usefixtures("exporting")
@pytest.mark.parametrize("levels", [3, 1000])
def test_exported_graphs_pair_as_lists_do_and_of_equal_ones_take_the_first(levels: int) -> None:
    similarity = (draw(0, 3, 9, 7) * levels / 3).round()
    for r in (0, 1, 4, 9):
        order, partner = pair_most_similar(similarity, r)
        for image in range(3):
            rows = similarity[image].tolist()
            ranked = sorted(range(9), key=lambda source: -max(rows[source]))
            assert order[image].tolist() == ranked
            assert partner[image].tolist() == [rows[source].index(max(rows[source])) for source in ranked[:r]]


@pytest.mark.parametrize("prefix", range(4))
def test_tokens_split_into_sources_and_destinations_at_once(prefix: int) -> None:
    values = draw(prefix, 2, prefix + 7, 3)
    sources, destinations = split_alternately(values, prefix)
    tokens = range(prefix, prefix + 7)
    assert torch.equal(sources, values[:, [token for token in tokens if token % 2 == 0]])
    assert torch.equal(destinations, values[:, [token for token in tokens if token % 2 == 1]])
    doubled = split_alternately(values[..., 0], prefix, lambda each: 2 * each)
    assert torch.equal(doubled[1], 2 * destinations[..., 0])


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("prefix", range(3))
def test_similarity_is_the_cosine_of_keys_averaged_over_heads(
    prefix: int, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loops:
        monkeypatch.setattr(compiled, "INSTALLED", False)
    q, k, v = draw(prefix, 3, 2, 4, prefix + 6, 5)
    similarity = alternate_similarity(Attention(q, k, v, 1.0), prefix)
    tokens = range(prefix, prefix + 6)
    sources, destinations = [t for t in tokens if t % 2 == 0], [t for t in tokens if t % 2 == 1]
    assert similarity.shape == (2, len(sources), len(destinations))
    for image in range(2):
        keys = k[image].mean(0)
        for i, source in enumerate(sources):
            for j, destination in enumerate(destinations):
                cosine = keys[source] @ keys[destination] / (keys[source].norm() * keys[destination].norm())
                torch.testing.assert_close(similarity[image, i, j], cosine)


def test_a_table_of_a_size_that_follows_from_the_image_is_exported() -> None:
    """Sources of ATM's later blocks: places at odd numbers below a count that no export knows, perhaps none."""

    class Odd(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left = (x > 0.0).nonzero().squeeze(1)
            odd = torch.arange(left.shape[0])[1::2]
            chosen = (x[:4] > 1.0).nonzero().squeeze(1)
            return _lookup(odd, chosen.unsqueeze(0))

    x = torch.tensor([2.0, -1.0, 3.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    program = torch.export.export(Odd(), (x,))
    assert program.module()(x).tolist() == [[1, 5]]
    assert program.module()(torch.full((8,), -1.0)).shape == (1, 0)
