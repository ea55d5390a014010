"""Selectors of image tokens: the published vectors, brute force on small sets, and what every one of them promises."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor
from typing import Any

import pytest
import torch
from torch import Tensor

import golden_files as golden
import vitrim
from golden_files import Reference
from vitrim.core import compiled
from vitrim.core.registry import selectors
from vitrim.core.selection import Seen, Selector, descending, largest
from vitrim.selectors import cdpruner, dart, divprune, fastervlm, pool, prumerge, visionzip, vispruner


def operands(ref: Reference) -> dict[str, Tensor]:
    """The operands of a file, float64, with those that follow from others."""
    given = {key: torch.from_numpy(x).double() for key, x in golden.weights.tensors(ref).items()}
    for key, told in ref["config"]["operands"].items():
        if key == "attention":
            factor = 2.0 if told.startswith("softmax(2 *") else 1.0
            given[key] = (factor * given["attention_logits"]).softmax(dim=-1)
        elif key == "features":  # clusters
            centres, noise = given["centres"], given["noise"]
            spread = float(told.split("+")[1].split("*")[0])
            own = torch.arange(noise.shape[1]) % centres.shape[1]
            given[key] = centres[:, own] + spread * noise
        elif key == "embeds":
            spread = float(told.split("+")[1].split("*")[0])
            given[key] = (given["still"] + spread * given["change"]).flatten(0, 1)
        else:
            assert told == "0.5 * queries"
            given[key] = 0.5 * given[key]
    return given


def args(ref: Reference) -> dict[str, Any]:
    found: dict[str, Any] = ref["config"]["args"]
    return found


def class_row(given: dict[str, Tensor]) -> Tensor:
    """(B, N) what patches get from the class token, mean over heads."""
    return given["attention"].mean(dim=1)[:, 1:]


# ---- the published vectors -------------------------------------------------------------------------------------------


@golden.cases(["vlm/fastervlm_01", "vlm/fastervlm_02"])
def test_fastervlm(ref: Reference) -> None:
    scores = class_row(operands(ref))
    ref.check("scores", scores.float())
    ref.check("kept", fastervlm.most_attended(scores, args(ref)["tokens"]))


@golden.cases(["vlm/vispruner_04", "vlm/vispruner_14"])
def test_vispruner(ref: Reference) -> None:
    given, own = operands(ref), args(ref)
    kept, important = vispruner.important_and_diverse(
        class_row(given), given["features"], own["tokens"], own["important_ratio"]
    )
    ref.check("kept", kept)
    ref.check("important", important)


@golden.cases(["vlm/visionzip_01", "vlm/visionzip_03"])
def test_visionzip(ref: Reference) -> None:
    """The files count positions with the class token as 0, and it is one of the dominant tokens."""
    given, own = operands(ref), args(ref)
    hidden, keys = given["hidden"], given["keys"].mean(dim=1)
    found = visionzip.zipped(class_row(given), keys[:, 1:], hidden[:, 1:], own["dominant"] - 1, own["contextual"])
    front = torch.zeros(len(hidden), 1, dtype=torch.long)
    dominant = torch.cat([front, found.dominant + 1], dim=1)
    ref.check("dominant", dominant)
    ref.check("anchors", found.anchors + 1)
    ref.check("assign", torch.cat([front - 1, found.assign], dim=1))
    own_tokens = hidden.gather(1, dominant[:, :, None].expand(-1, -1, hidden.shape[2]))
    ref.check("tokens", torch.cat([own_tokens, found.contextual], dim=1))

    tokens = own["dominant"] + own["contextual"]
    options = f"tokens={tokens},contextual={own['contextual']},order=appended"
    seen = Seen(hidden[:, 1:], None, class_row(given), keys[:, 1:], hidden[:, 0])
    choices = vitrim.parse_selector(f"visionzip:{options}").select(seen)
    ref.check("tokens", torch.stack([choice.of(x) for choice, x in zip(choices, hidden[:, 1:], strict=True)]))


@golden.cases(["vlm/visionzip_qwen_01"])
def test_visionzip_without_a_class_token(ref: Reference) -> None:
    """Sums over queries and means over the four patches of a cell, brought from the order of windows to the grid's."""
    given, own = operands(ref), args(ref)
    order = torch.from_numpy(ref["window_index"]).long().argsort()
    received = given["attention"].mean(dim=0).sum(dim=0).unflatten(0, (-1, 4)).mean(dim=1)[order]
    keys = given["keys"].mean(dim=0).unflatten(0, (-1, 4)).mean(dim=1)[order]
    embeds = given["embeds"]
    dominant, contextual = int(own["dominant"] * len(embeds)), max(int(own["contextual"] * len(embeds)), 1)
    seen = Seen(embeds[None], None, received[None], keys[None])
    config = vitrim.parse_selector(f"visionzip:tokens={dominant + contextual},contextual={contextual}")
    (choice,) = config.select(seen)
    ref.check("kept", choice.kept)
    ref.check("tokens", choice.of(embeds))


@golden.cases(["vlm/divprune_01", "vlm/divprune_02"])
def test_divprune(ref: Reference) -> None:
    features = operands(ref)["features"]
    config = vitrim.parse_selector(f"divprune:keep={args(ref)['ratio']}")
    assert config.count(features.shape[1]) == args(ref)["tokens"]
    ref.check("picked", divprune.farthest_first(features, args(ref)["tokens"]))
    ref.check("kept", torch.stack([choice.kept for choice in config.select(Seen(features))]))


@golden.cases(["vlm/dart_embeddings_01", "vlm/dart_embeddings_02"])
def test_dart_on_embeddings(ref: Reference) -> None:
    own, embeds = args(ref), operands(ref)["embeds"]
    is_text = torch.ones(len(embeds), dtype=torch.bool)
    for start, stop in own["spans"]:
        is_text[start:stop] = False
    config = vitrim.parse_selector(
        f"dart:keep={1 - own['reduction_ratio']},pivots={own['pivot_image']},text_pivots={own['pivot_text']}"
    )
    stays = is_text.clone()
    for start, stop in own["spans"]:
        stays[start:stop] = config.mask(embeds[start:stop], text=embeds[is_text])
        assert int(stays[start:stop].sum()) == config.count(stop - start)
    ref.check("kept", stays.nonzero().squeeze(1))


@golden.cases(["vlm/cdpruner_01", "vlm/cdpruner_03"])
def test_cdpruner(ref: Reference) -> None:
    """As released, over the batch; and every image by itself."""
    given, tokens = operands(ref), args(ref)["tokens"]
    found = cdpruner.relevance(given["image_embeds"], given["text_embeds"], opposed=True)
    over = cdpruner.scaled(found, batch=True)
    ref.check("relevance", over.float())
    picked = cdpruner.determinantal(given["features"], over, tokens)
    ref.check("picked", picked)
    ref.check("kept", picked.sort(dim=1).values)
    if "kept_alone" in ref:
        alone = cdpruner.scaled(found)
        ref.check("relevance_alone", alone.float())
        ref.check("kept_alone", cdpruner.determinantal(given["features"], alone, tokens).sort(dim=1).values)


@golden.cases(["vlm/prumerge_01", "vlm/prumerge_02", "vlm/prumerge_plus_01"])
def test_prumerge(ref: Reference) -> None:
    given = operands(ref)
    queries, keys, features = given["queries"], given["keys"], given["features"]
    attention = prumerge.one_head_attention(queries[:, 0], keys)
    ref.check("ratio", torch.tensor(prumerge.outlier_ratio(attention), dtype=torch.float64))
    plus = str(ref["config"]["method"] == "prumerge_plus").lower()
    config = vitrim.parse_selector(f"prumerge:batch=true,order=appended,plus={plus}")
    choices = config.select(Seen(features, query=queries[:, 0], wide_keys=keys))
    ref.check("kept", torch.stack([choice.kept for choice in choices]))
    ref.check("tokens", torch.stack([choice.of(x) for choice, x in zip(choices, features, strict=True)]))


@golden.cases(["vlm/evs_01", "vlm/evs_02"])
def test_evs(ref: Reference) -> None:
    own, embeds = args(ref), operands(ref)["embeds"]
    frames, rows, columns = own["thw"]
    grid = (frames, rows // own["merge"], columns // own["merge"])
    config = vitrim.parse_selector(f"evs:keep={1 - own['pruning_rate']}")
    mask = config.mask(embeds, grid)
    ref.check("mask", mask)
    ref.check("kept", mask.nonzero().squeeze(1))
    assert int(mask.sum()) == config.count(grid)


# ---- brute force -----------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_determinantal_choice_makes_each_determinant_largest() -> None:
    """Recomputed for every candidate; and the first two are the best pair whose first is the best single one."""
    features, weights = random(3, 12, 7), random(3, 12, seed=1).abs() + 0.1
    picked = cdpruner.determinantal(features, weights, 6)
    unit = features / features.norm(dim=-1, keepdim=True)
    kernel = (unit @ unit.transpose(1, 2)) * weights[:, :, None] * weights[:, None]
    for own, order in zip(kernel, picked.tolist(), strict=True):
        for number in range(6):
            before = order[:number]
            values = {
                place: float(torch.linalg.det(own[[*before, place]][:, [*before, place]]))
                for place in range(12)
                if place not in before
            }
            assert order[number] == max(values, key=lambda place: values[place])


def test_farthest_first_is_what_a_loop_over_all_distances_finds() -> None:
    features = random(2, 15, 4)
    for own, order in zip(features, divprune.farthest_first(features, 15).tolist(), strict=True):
        distance = [[1 - float(torch.cosine_similarity(a, b, dim=0)) for b in own] for a in own]
        nearest = [min(distance[a][b] for b in range(15) if b != a) for a in range(15)]
        expected = [max(range(15), key=lambda place: nearest[place])]
        while len(expected) < 15:
            free = [place for place in range(15) if place not in expected]
            expected.append(max(free, key=lambda place: min(distance[place][one] for one in expected)))
        assert order == expected


def test_equal_tokens_are_picked_once_each() -> None:
    """Where the releases repeat a token or lose some, others follow."""
    features = random(1, 8, 16).repeat(1, 4, 1)
    assert sorted(divprune.farthest_first(features, 16)[0].tolist()) == sorted(
        set(divprune.farthest_first(features, 16)[0].tolist())
    )
    weights = random(1, 32, seed=2).abs()
    order = cdpruner.determinantal(features, weights, 16)[0].tolist()
    assert len(set(order)) == 16
    assert {place % 8 for place in order[:8]} == set(range(8))
    left = [place for place in weights[0].argsort(descending=True).tolist() if place not in order[:8]]
    assert order[8:] == left[:8]  # by relevance
    narrow = cdpruner.determinantal(random(2, 40, 8).float(), torch.ones(2, 40), 20)
    assert all(len(set(row)) == 20 for row in narrow.tolist())


def test_dart_keeps_pivots_and_what_is_least_like_them() -> None:
    features, text = random(1, 20, 6)[0], random(5, 6, seed=3)
    pivots = features.abs().sum(1).argsort(descending=True)[:2].tolist()
    words = text[text.abs().sum(1).argsort(descending=True)[:1]]
    kept = set(pivots)
    acting = [*features[pivots], *words]
    for number, pivot in enumerate(acting):
        left = 8 - len(kept)
        share = -(-left // (len(acting) - number))
        cosine = torch.cosine_similarity(features, pivot[None], dim=1)
        free = [place for place in cosine.argsort().tolist() if place not in kept]
        kept |= set(free[:share])
    found = dart.least_like_pivots(features, words, 8, 2)
    assert found.tolist() == sorted(kept)


def test_relevance_is_scaled_and_weighed_as_the_papers_say() -> None:
    """The least relevant token keeps a trace, 1e-6 of the range; theta = 0.75 makes alpha 1.5."""
    values = torch.tensor([[2.0, 3.0, 6.0]], dtype=torch.float64)
    expected = torch.tensor([[0.25e-6, 0.25 + 0.25e-6, 1 + 0.25e-6]], dtype=torch.float64)
    torch.testing.assert_close(cdpruner.scaled(values), expected, rtol=1e-12, atol=0)
    features, text, found = random(1, 40, 8), [random(5, 8, seed=3)], []
    rel = torch.cosine_similarity(features[0][:, None], text[0][None], dim=2).mean(dim=1)
    rel = (rel - rel.min() + 1e-6) / (rel.max() - rel.min())
    for alpha, theta in ((0.5, 0.5), (1.5, 0.75), (3.0, 6 / 7)):
        picked = cdpruner.determinantal(features, (alpha * rel).exp()[None], 12)[0]
        config = vitrim.parse_selector(f"cdpruner:tokens=12,weights=exponential,theta={theta}")
        (choice,) = config.select(Seen(features, text=text))
        assert choice.kept.tolist() == sorted(picked.tolist())
        found.append(set(picked.tolist()))
    assert found[0] != found[1] != found[2]


def test_vispruner_takes_one_more_by_attention_where_an_odd_number_is_left() -> None:
    """Of 21 tokens 5 by attention of 11 leave 16; of 20, 15, so it takes 6."""
    for total, important in ((21, 5), (20, 6)):
        scores, features = random(1, total).softmax(dim=1), random(1, total, 6, seed=1)
        kept, best = vispruner.important_and_diverse(scores, features, 11, 0.5)
        assert best[0].tolist() == scores[0].argsort(descending=True)[:important].tolist()
        assert len(set(kept[0].tolist())) == 11


@pytest.mark.parametrize("by", ["a compiled loop", "operators"])
def test_vispruner_drops_what_pairs_one_by_one_would_drop(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain loops: every second of the others against those between, eight a round."""
    monkeypatch.setattr(compiled, "INSTALLED", by != "operators")
    scores, features = random(1, 90).softmax(dim=1), random(1, 90, 6, seed=1)
    unit = torch.nn.functional.normalize(features[0], dim=1)
    order = scores[0].argsort(descending=True).tolist()
    important, rest = order[:10], order[10:]
    while (drop := min(8, len(rest) - 10, len(rest) // 2)) > 0:
        even, odd = rest[0::2], rest[1::2]
        nearest = {place: max(float(unit[place] @ unit[other]) for other in odd) for place in even}
        rest = sorted(even, key=lambda place: -nearest[place])[drop:] + odd
    kept, _ = vispruner.important_and_diverse(scores, features, 20, 0.5)
    assert kept[0].tolist() == sorted(important + rest)


def test_the_sample_of_prumerge_plus_leaves_the_last_token_out() -> None:
    """As released: every third of 0 to N - 2, of a ratio of 0.1."""
    attention = torch.zeros(31)
    attention[[4, 8, 1]] = torch.tensor([0.5, 0.3, 0.2])
    kept, _, _ = prumerge.merged(random(31, 4), attention, random(31, 4, seed=1), 0.1, plus=True)
    assert kept.tolist() == [4, 8, 1, *range(0, 30, 3)]


def test_a_share_is_that_of_the_number_as_written() -> None:
    """All shares of two digits, of all numbers to 120, by fractions: 29 of 100 at 0.29, though 0.29 * 100 < 29."""
    for selector, rounding in (("evs", floor), ("dart", ceil), ("divprune", round)):
        for percent in range(1, 101):
            config = vitrim.parse_selector(f"{selector}:keep={percent / 100}")
            for tokens in range(1, 121, 7):
                share = Fraction(percent, 100)
                assert config.budget(tokens) == max(rounding(share * tokens), 1), (selector, percent, tokens)
        assert vitrim.parse_selector(f"{selector}:keep=0.29").budget(100) == 29


def test_of_many_equal_scores_the_first_win() -> None:
    """5,000 ties, more than a sort that is not stable leaves in order by chance."""
    scores = torch.zeros(2, 5000)
    scores[1, 4000:] = 1.0
    assert largest(scores, 7).tolist() == [list(range(7)), list(range(4000, 4007))]
    assert descending(scores)[0].tolist() == list(range(5000))


def test_evs_keeps_the_first_frame_whatever_the_budget() -> None:
    config, features = vitrim.parse_selector("evs:keep=0.1"), random(1, 48, 6)
    assert config.count((4, 3, 4)) == 12
    assert config.mask(features[0], (4, 3, 4)).tolist() == [True] * 12 + [False] * 36


def test_pool_averages_a_grid_of_four_by_six_to_two_by_three() -> None:
    """By hand: tokens 0 to 23 in rows of six; cells of 2 x 2 have means 3.5, 5.5, 7.5 and twelve more below."""
    what = Seen(torch.arange(24.0).view(1, 24, 1), (1, 4, 6))
    (choice,) = vitrim.parse_selector("pool:tokens=6").select(what)
    assert choice.of(what.features[0]).squeeze(1).tolist() == [3.5, 5.5, 7.5, 15.5, 17.5, 19.5]
    assert choice.kept.tolist() == [0, 2, 4, 12, 14, 16]  # the upper left of the four in the middle
    assert choice.merged is not None
    assert choice.merged.all()


def test_means_of_unequal_cells_are_each_of_their_own_tokens() -> None:
    """By hand: five tokens in cells of three and two; what a cell's sum is divided by is its own size."""
    what = Seen(torch.tensor([[[1.0], [2.0], [6.0], [10.0], [20.0]]]), (1, 1, 5))
    (choice,) = vitrim.parse_selector("pool:tokens=2").select(what)
    assert choice.of(what.features[0]).squeeze(1).tolist() == [3.0, 15.0]
    alone = Seen(torch.tensor([[[1.0], [2.0], [6.0]]]), (1, 1, 3))
    (choice,) = vitrim.parse_selector("pool:tokens=2").select(alone)
    assert choice.of(alone.features[0]).squeeze(1).tolist() == [1.5, 6.0]
    assert choice.merged is not None
    assert choice.merged.tolist() == [True, False]


def test_pool_cells_are_disjoint_and_nearly_equal() -> None:
    """By hand: five columns in two cells are 3 and 2, a row of three frames in two cells is 2 and 1 frames."""
    own, middle = pool.cells((1, 1, 5), (1, 1, 2))
    assert (own.tolist(), middle.tolist()) == ([0, 0, 0, 1, 1], [1, 3])
    own, middle = pool.cells((3, 1, 2), (2, 1, 1))
    assert (own.tolist(), middle.tolist()) == ([0, 0, 0, 0, 1, 1], [0, 4])
    plain = torch.nn.functional.avg_pool2d(random(1, 7, 12, 9), 3)
    what = Seen(random(1, 7, 12, 9).flatten(2).transpose(1, 2), (1, 12, 9))
    (choice,) = vitrim.parse_selector("pool:tokens=12").select(what)
    torch.testing.assert_close(choice.of(what.features[0]), plain.flatten(2).transpose(1, 2)[0])


@pytest.mark.parametrize(
    ("grid", "tokens", "coarse"),
    [
        ((24, 24), 64, (1, 8, 8)),
        ((24, 24), 63, (1, 8, 7)),
        (576, 144, (1, 12, 12)),
        ((12, 48), 144, (1, 6, 24)),
        ((4, 6, 6), 36, (4, 3, 3)),
        ((4, 6, 6), 3, (3, 1, 1)),
        ((24, 24), 900, (1, 24, 24)),
        ((1, 7), 3, (1, 1, 3)),
    ],
)
def test_pool_takes_the_nearest_rectangle(grid: Any, tokens: int, coarse: tuple[int, int, int]) -> None:
    config = pool.Pool(tokens=tokens)
    assert config.grids(grid)[1] == coarse
    assert config.count(grid) == coarse[0] * coarse[1] * coarse[2]


def test_pool_of_videos_never_mixes_frames_while_each_gets_a_token() -> None:
    features = torch.arange(3.0).repeat_interleave(8).view(1, 24, 1)
    (choice,) = vitrim.parse_selector("pool:tokens=6").select(Seen(features, (3, 2, 4)))
    assert choice.of(features[0]).squeeze(1).tolist() == [0, 0, 1, 1, 2, 2]


def test_random_draws_evenly_and_repeats() -> None:
    """Each of 12 tokens stays in a quarter of 2,000 draws, within five deviations; one seed draws one set."""
    counts = torch.zeros(12)
    for seed in range(2000):
        counts += vitrim.parse_selector(f"random:tokens=3,seed={seed}").mask(torch.zeros(12, 1))
    assert (counts - 500).abs().max() < 5 * (2000 * 0.25 * 0.75) ** 0.5
    config = vitrim.parse_selector("random:tokens=3")
    first = config.select(Seen(random(2, 12, 4)))
    assert torch.equal(first[0].kept, config.select(Seen(random(1, 12, 4, seed=8)))[0].kept)
    assert torch.equal(first[0].kept, first[1].kept)


@pytest.mark.parametrize(
    "selector", ["visionzip:tokens=9", "visionzip:tokens=9,order=appended", "prumerge:tokens=9", "pool:tokens=9"]
)
def test_tokens_that_are_made_of_several_are_marked(selector: str) -> None:
    """Those that differ from what stood at their place."""
    what = seen()
    for image, choice in enumerate(vitrim.parse_selector(selector).select(what)):
        assert choice.tokens is not None
        assert choice.merged is not None
        changed = (choice.tokens != what.features[image][choice.kept]).any(dim=1)
        assert choice.merged.tolist() == changed.tolist()
        assert changed.any()


# ---- what every selector promises ------------------------------------------------------------------------------------

BUDGETS = ["tokens=9", "keep=0.3", "tokens=1", "tokens=400", "keep=1"]
every = pytest.mark.parametrize("name", [name for name, one in selectors().items() if one.place != "image"])


def seen(batch: int = 3, dtype: torch.dtype = torch.float64, grid: tuple[int, int, int] = (3, 5, 4)) -> Seen:
    total = grid[0] * grid[1] * grid[2]
    scores = random(batch, total, seed=1).softmax(dim=1)
    return Seen(
        features=random(batch, total, 16).to(dtype),
        grid=grid,
        scores=scores,
        keys=random(batch, total, 8, seed=2),
        query=random(batch, 16, seed=4).to(dtype),
        wide_keys=random(batch, 1 + total, 16, seed=5).to(dtype),
        text=[random(5 + image, 16, seed=6 + image).to(dtype) for image in range(batch)],
    )


@pytest.mark.parametrize("budget", BUDGETS)
@every
def test_counts_come_first_and_hold(name: str, budget: str) -> None:
    config = vitrim.parse_selector(f"{name}:{budget}")
    what = seen()
    for choice in config.select(what):
        assert choice.number == config.count((3, 5, 4))
        assert len(set(choice.kept.tolist())) == len(choice.kept)
        assert choice.of(what.features[0]).shape == (choice.number, 16)
        assert choice.kept.tolist() == sorted(choice.kept.tolist())


def test_zeros_are_picked_last() -> None:
    """They have no direction, so they add to no choice."""
    features = random(2, 12, 6).index_fill(1, torch.tensor([0, 3, 11]), 0)
    for picked in (divprune.farthest_first(features, 12), cdpruner.determinantal(features, torch.ones(2, 12), 12)):
        for order in picked.tolist():
            assert sorted(order) == list(range(12))
            assert order.index(0) >= 6  # cdpruner: the rank, 6, ends before
        assert {0, 3, 11} <= set(picked[0, 6:].tolist())
    assert {0, 3, 11} == set(divprune.farthest_first(features, 12)[0, 9:].tolist())


def zero(what: Tensor) -> Tensor:
    return torch.zeros_like(what)


def equal(what: Tensor) -> Tensor:
    return torch.ones_like(what)


def repeated(what: Tensor) -> Tensor:
    """Four tokens again and again."""
    return what[:, torch.arange(what.shape[1]) % 4]


def partly_zero(what: Tensor) -> Tensor:
    """Every second token, the first among them."""
    return what.index_fill(1, torch.arange(0, what.shape[1], 2), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("made", [zero, equal, repeated, partly_zero])
@every
def test_tokens_that_nothing_tells_apart_are_chosen_once(
    name: str, made: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Padding is zeros, and a blank page is one token again and again: what goes on is distinct, ascending, counted."""
    plain = seen(dtype=dtype)
    assert plain.scores is not None
    assert plain.keys is not None
    assert plain.wide_keys is not None
    what = Seen(
        features=made(plain.features),
        grid=plain.grid,
        scores=made(plain.scores),
        keys=made(plain.keys),
        query=plain.query,
        wide_keys=made(plain.wide_keys),
        text=[made(words[None])[0] for words in plain.text or ()],
    )
    for budget in ("tokens=1", "tokens=2", "tokens=9", "tokens=59", "keep=1"):
        config = vitrim.parse_selector(f"{name}:{budget}")
        for image, choice in enumerate(config.select(what)):
            kept = choice.kept.tolist()
            assert kept == sorted(set(kept))
            assert choice.number == config.count((3, 5, 4))
            assert choice.of(what.features[image]).isfinite().all()


@every
def test_an_image_gets_alone_what_it_gets_in_a_batch(name: str) -> None:
    what, config = seen(), vitrim.parse_selector(name)
    for image, together in enumerate(config.select(what)):
        (alone,) = config.select(what.image(image))
        assert torch.equal(alone.kept, together.kept)
        features = what.features[image]
        torch.testing.assert_close(alone.of(features), together.of(features), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every
def test_half_precision_decides_in_single(name: str, dtype: torch.dtype) -> None:
    config = vitrim.parse_selector(name)
    what = seen(dtype=dtype)
    wide = {
        key: [x.float() for x in value]
        if isinstance(value, list)
        else value.float()
        if isinstance(value, Tensor)
        else value
        for key, value in vars(what).items()
    }
    for half, single in zip(config.select(what), config.select(Seen(**wide)), strict=True):
        if name != "prumerge":  # which weighs by attention in the dtype of the tower
            assert torch.equal(half.kept, single.kept)
        assert half.of(what.features[0]).dtype == dtype


@every
def test_options_are_written_and_read_like_those_of_methods(name: str) -> None:
    config = vitrim.parse_selector(f"{name}:tokens=7")
    assert config.describe() == f"{name}:tokens=7"
    assert vitrim.parse_selector(config.describe()) == config
    assert vitrim.parse_selector(config) is config
    assert getattr(vitrim, type(config).__name__) is type(config)
    assert config.paper
    assert config.published_with


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("divprun:tokens=4", "unknown selector 'divprun'; did you mean 'divprune'"),
        ("divprune:token=4", "unknown option of divprune 'token'; did you mean 'tokens'"),
        ("divprune:tokens=0", "divprune: tokens=0: must be at least 1"),
        ("divprune:tokens=4,keep=0.5", "give tokens or keep, not both"),
        ("divprune:keep=1.5", "keep=1.5"),
        ("divprune:tokens", "cannot read 'tokens'"),
        ("prumerge:plus=true,tokens=4", "takes neither tokens nor keep"),
        ("visionzip:tokens=4,contextual=4", "leaves none of 4 tokens"),
    ],
)
def test_errors_are_of_one_line(text: str, message: str) -> None:
    with pytest.raises(vitrim.VitrimError) as error:
        vitrim.parse_selector(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: vitrim.parse_selector("prumerge").count((24, 24)),
        lambda: vitrim.parse_selector("prumerge:plus=true").count((24, 24)),
        lambda: vitrim.parse_selector("fastervlm").mask(torch.zeros(4, 2)),
        lambda: vitrim.parse_selector("evs").mask(torch.zeros(4, 2)),
        lambda: vitrim.parse_selector("divprune").count((0, 3)),
    ],
)
def test_what_is_not_known_is_said(ask: Callable[[], object]) -> None:
    with pytest.raises(vitrim.VitrimError):
        ask()


def test_a_selector_of_ones_own() -> None:
    from vitrim.core.registry import _SELECTORS
    from vitrim.core.selection import Choice

    @vitrim.register_selector
    class First(Selector):
        """The first tokens."""

        name = "first"

        def select(self, seen: Seen) -> list[Choice]:
            return [Choice(torch.arange(self.budget(seen.features.shape[1]))) for _ in seen.features]

    try:
        assert vitrim.parse_selector("first:tokens=2").mask(torch.zeros(3, 1)).tolist() == [True, True, False]
        with pytest.raises(vitrim.VitrimError, match="registered twice"):
            vitrim.register_selector(type("Other", (Selector,), {"name": "first"}))
    finally:
        del _SELECTORS["first"]


@pytest.mark.parametrize(("budget", "merged"), [(64, 10), (128, 20), (192, 30), (100, 16), (19, 3), (3, 0)])
def test_visionzip_merges_ten_of_sixty_four_rounded(budget: int, merged: int) -> None:
    """The first three as published."""
    assert vitrim.parse_selector(f"visionzip:tokens={budget}").shares(budget) == (budget - merged, merged)
