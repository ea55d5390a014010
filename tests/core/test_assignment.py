"""Whatever a method decides, every input token is accounted for and pooled tokens are the means they claim to be.

Sequences are random: 5 to 700 tokens, odd and even, 0 to 5 of them prefix, one to three images, each with groups of its
own. What is expected is worked out token by token in plain Python.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.assignment import Hard, Soft, merge, prune
from vitrim.core.tokens import TokenState, take, unmerge
from vitrim.errors import VitrimError

CHANNELS = 3


@dataclass
class Case:
    """A random sequence and the generator that decides about it."""

    n: int
    prefix: int
    batch: int
    share: float
    seed: int

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def tokens(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(self.batch, self.n, CHANNELS, generator=self.random, dtype=torch.float64).to(dtype)

    def start(self, x: Tensor) -> TokenState:
        return TokenState.start(x, self.prefix)

    def count(self, patches: int) -> int:
        """How many of so many patches stay: at least one."""
        return max(1, round(self.share * patches))

    def order(self, patches: int) -> Tensor:
        """(B, P): another permutation for every image."""
        return torch.stack([torch.randperm(patches, generator=self.random) for _ in range(self.batch)])

    def merge(self, state: TokenState, **options: object) -> Hard:
        """All patches stay or join a random one that stays."""
        order, kept = self.order(state.num_patches), self.count(state.num_patches)
        into = torch.randint(kept, (self.batch, state.num_patches - kept), generator=self.random)
        return merge(state, order[:, :kept], order[:, kept:], into, **options)

    def prune(self, state: TokenState) -> Hard:
        return prune(state, self.order(state.num_patches)[:, : self.count(state.num_patches)])


cases = st.builds(
    lambda n, prefix, batch, share, seed: Case(n, min(prefix, n - 1), batch, share, seed),
    n=st.integers(5, 700),
    prefix=st.integers(0, 5),
    batch=st.integers(1, 3),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)


def members(hard: Hard, image: int) -> list[list[int]]:
    """The old tokens of every new token of one image, the anchor first; padding slots are empty."""
    anchors = hard.anchor[image].tolist()
    real = [True] * len(anchors) if hard.valid is None else hard.valid[image].tolist()
    groups = [[anchor] if is_real else [] for anchor, is_real in zip(anchors, real, strict=True)]
    if hard.moved is not None and hard.into is not None:
        for token, group in zip(hard.moved[image].tolist(), hard.into[image].tolist(), strict=True):
            if group < len(groups):
                groups[group].append(token)
    return groups


def weighted(x: Tensor, weight: Tensor, group: list[int], normalise: bool = True) -> list[float]:
    """The weighted mean (or sum) of the tokens ``group`` of ``x`` (N, C), in Python floats."""
    rows, weights = x.tolist(), weight.tolist()
    total = [sum(weights[i] * rows[i][c] for i in group) for c in range(CHANNELS)]
    return [value / sum(weights[i] for i in group) for value in total] if normalise else total


def brute_force_pool(hard: Hard, x: Tensor, weight: Tensor, normalise: bool = True) -> list[Tensor]:
    """New tokens of every image (M, C); padding slots are NaN."""
    nothing = [float("nan")] * CHANNELS
    return [
        torch.tensor(
            [
                weighted(x[image], weight[image], group, normalise) if group else nothing
                for group in members(hard, image)
            ],
            dtype=torch.float64,
        )
        for image in range(x.shape[0])
    ]


def assert_consistent(state: TokenState) -> None:
    """Anchors are their own group, source points at real slots only, the prefix is where it was."""
    batch, m = state.size.shape
    own = state.source.gather(1, state.position)
    real = torch.ones(batch, m, dtype=torch.bool) if state.mask is None else state.mask
    assert torch.equal(own[real], torch.arange(m).expand(batch, m)[real])
    assert state.source.max() < m
    for image in range(batch):
        pointed_at = state.source[image][state.source[image] >= 0]
        assert real[image, pointed_at].all()
    prefix = torch.arange(state.num_prefix).expand(batch, -1)
    assert torch.equal(state.source[:, : state.num_prefix], prefix)
    assert torch.equal(state.position[:, : state.num_prefix], prefix)
    assert (state.size[:, : state.num_prefix] == 1).all()


def group_counts(state: TokenState) -> Tensor:
    """(B, M): how many input tokens point at each current token."""
    counts = [torch.bincount(row[row >= 0], minlength=state.num_tokens) for row in state.source]
    return torch.stack(counts).to(state.size.dtype)


# ---- merge ---------------------------------------------------------------------------------------------------------


@given(case=cases)
def test_pooling_is_the_weighted_mean_of_each_group_and_unmerge_repeats_it(case: Case) -> None:
    x = case.tokens()
    size = torch.randint(1, 9, (case.batch, case.n), generator=case.random).double()
    state = replace(case.start(x), size=size, uniform=False)
    hard = case.merge(state)
    pooled, after = hard.apply(x, state)
    everywhere = unmerge(pooled, after)
    for image, expected in enumerate(brute_force_pool(hard, x, size)):
        torch.testing.assert_close(pooled[image], expected, atol=1e-12, rtol=1e-12)
        for slot, group in enumerate(members(hard, image)):
            assert (everywhere[image, group] == pooled[image, slot]).all()
            assert after.size[image, slot] == size[image, group].sum()
    # the weighted sum of all tokens is kept, whoever merged with whom
    torch.testing.assert_close((pooled * after.size[..., None]).sum(1), (x * size[..., None]).sum(1))


@given(case=cases, steps=st.lists(st.sampled_from(["merge", "prune"]), min_size=1, max_size=4))
def test_chains_compose(case: Case, steps: list[str]) -> None:
    """After any merges and prunings a token is the plain mean of the input tokens that point at it."""
    x0 = x = case.tokens()
    state = case.start(x)
    for step in steps:
        x, state = (case.merge(state) if step == "merge" else case.prune(state)).apply(x, state)
    assert_consistent(state)
    assert torch.equal(group_counts(state), state.size)
    assert torch.equal(x[:, : case.prefix], x0[:, : case.prefix])  # the prefix, bit for bit
    assert state.pruned <= ("prune" in steps)
    assert state.lost == bool((state.source < 0).any())
    assert not state.uniform or (state.size == 1).all()
    for image in range(case.batch):
        groups = defaultdict(list)
        for token, group in enumerate(state.source[image].tolist()):
            groups[group].append(token)
        lost = groups.pop(-1, [])
        assert (unmerge(x, state)[image, lost] == 0).all()
        assert sorted(groups) == list(range(state.num_tokens))
        for group, tokens in groups.items():
            mean = weighted(x0[image], torch.ones(case.n), tokens)
            assert x[image, group].tolist() == pytest.approx(mean, abs=1e-12)


@given(case=cases, normalise=st.booleans())
def test_weights_other_than_size(case: Case, normalise: bool) -> None:
    x = case.tokens()
    weight = torch.rand(case.batch, case.n, generator=case.random, dtype=torch.float64) + 0.1
    state = case.start(x)
    hard = case.merge(state, weight=weight, normalise=normalise)
    pooled, after = hard.apply(x, state)
    for image, expected in enumerate(brute_force_pool(hard, x, weight, normalise)):
        torch.testing.assert_close(pooled[image], expected, atol=1e-12, rtol=1e-12)
    assert (after.size.sum(1) == case.n).all()  # sizes count tokens, whatever they weigh


@given(case=cases)
def test_target_and_expand_invert_the_order_of_the_output(case: Case) -> None:
    x = case.tokens()
    state = case.start(x)
    merging, pruning = case.merge(state), case.prune(state)
    for hard in (merging, pruning):
        target = hard.target(case.n)
        for image in range(case.batch):
            expected = [-1] * case.n
            for slot, group in enumerate(members(hard, image)):
                for token in group:
                    expected[token] = slot
            assert target[image].tolist() == expected
        y = hard.pool(x, state.size)
        expanded = hard.expand(y, case.n)
        assert torch.equal(expanded[target >= 0], take(y, target.clamp_min(0))[target >= 0])
        assert (expanded[target < 0] == 0).all()
        assert torch.equal(expanded, unmerge(y, hard.advance(x, state)))
    assert (merging.target(case.n) >= 0).all()
    assert not merging.is_selection
    assert pruning.is_selection


def test_merging_nothing_is_a_permutation_of_single_tokens() -> None:
    x = torch.randn(2, 9, CHANNELS)
    state = TokenState.start(x, num_prefix=2)
    order = torch.stack([torch.randperm(7), torch.randperm(7)])
    nothing = torch.empty(2, 0, dtype=torch.long)
    pooled, after = merge(state, order, nothing, nothing).apply(x, state)
    assert torch.equal(pooled[:, 2:], take(x[:, 2:], order))
    assert after.uniform
    assert after.reduced  # position tables must follow the order
    assert torch.equal(unmerge(pooled, after), x)


@pytest.mark.parametrize("shape", [(2, 4), (1, 5), (2, 6), (5,)])
def test_weights_of_other_tokens_are_refused(shape: tuple[int, ...]) -> None:
    state = TokenState.start(torch.zeros(2, 5, 3), num_prefix=1)
    kept, moved = torch.tensor([[0, 2], [0, 1]]), torch.tensor([[1], [2]])
    message = rf"weight for each of 5 tokens, .* \(2, 5\), got {re.escape(str(shape))}"
    with pytest.raises(VitrimError, match=message):
        merge(state, kept, moved, torch.zeros_like(moved), weight=torch.ones(shape))


def test_a_merge_that_leaves_tokens_out_has_lost_them() -> None:
    x = torch.randn(1, 6, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    after = merge(state, torch.tensor([[4, 0]]), torch.tensor([[2]]), torch.tensor([[1]])).advance(x, state)
    assert after.source.tolist() == [[0, 2, -1, 2, -1, 1]]
    assert after.lost
    assert after.pruned
    assert after.size.tolist() == [[1.0, 1.0, 2.0]]


def test_carried_tensors_move_with_their_anchors() -> None:
    x = torch.randn(2, 6, CHANNELS)
    flat, deep = torch.randn(2, 6), torch.randn(2, 6, 4, 5)
    state = replace(TokenState.start(x, num_prefix=1), carry={"flat": flat, "deep": deep})
    hard = merge(state, torch.tensor([[3, 0], [1, 4]]), torch.tensor([[1], [0]]), torch.tensor([[0], [1]]))
    carry = hard.advance(x, state).carry
    for image, kept in enumerate([[0, 4, 1], [0, 2, 5]]):
        assert torch.equal(carry["flat"][image], flat[image, kept])
        assert torch.equal(carry["deep"][image], deep[image, kept])


# ---- ragged: another number of tokens in every image ---------------------------------------------------------------


def ragged_merge(case: Case, state: TokenState) -> Hard:
    """Every image keeps a random number of its real patches, and the others join one of those. Slots without meaning
    hold arbitrary patches, as they do in a method that sorts and cuts."""
    patches, mask = state.num_patches, state.mask
    real = [list(range(patches))] * case.batch
    if mask is not None:
        real = [row.nonzero().flatten().tolist() for row in mask[:, state.num_prefix :]]
    kept, joins = [], []
    for places in real:
        order = [places[i] for i in torch.randperm(len(places), generator=case.random).tolist()]
        count = int(torch.randint(1, len(places) + 1, (1,), generator=case.random))
        kept.append(order[:count])
        joins.append(order[count:])
    width, most = max(map(len, kept)), max(map(len, joins))

    def arbitrary(count: int) -> list[int]:
        return torch.randint(patches, (count,), generator=case.random).tolist()

    into = [torch.randint(len(k), (len(j),), generator=case.random).tolist() for k, j in zip(kept, joins, strict=True)]
    return merge(
        state,
        torch.tensor([row + arbitrary(width - len(row)) for row in kept]),
        torch.tensor([row + arbitrary(most - len(row)) for row in joins], dtype=torch.long).view(case.batch, most),
        torch.tensor([row + [width] * (most - len(row)) for row in into], dtype=torch.long).view(case.batch, most),
        valid=torch.tensor([[slot < len(row) for slot in range(width)] for row in kept]),
    )


@given(case=cases)
def test_padding_owns_nothing_and_real_slots_account_for_everything(case: Case) -> None:
    x0 = x = case.tokens()
    state = case.start(x)
    for _ in range(2):  # the second time on what is padded already
        hard = ragged_merge(case, state)
        size = state.size
        before = x
        x, state = hard.apply(x, state)
        assert state.mask is not None
        assert hard.valid is not None
        assert torch.equal(state.mask, hard.valid)
        for image, expected in enumerate(brute_force_pool(hard, before, size)):
            real = state.mask[image]
            torch.testing.assert_close(x[image, real], expected[real], atol=1e-12, rtol=1e-12)
        assert_consistent(state)
        assert (state.source >= 0).all()
        assert ((state.size * state.mask).sum(1) == case.n).all()
        assert (state.size[~state.mask] == 1).all()  # log(1) = 0
        assert torch.equal(group_counts(state)[state.mask], state.size[state.mask])
        assert not state.pruned
    assert torch.equal(x[:, : case.prefix], x0[:, : case.prefix])


def test_a_ragged_selection_forgets_what_is_not_valid() -> None:
    x = torch.randn(2, 5, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    valid = torch.tensor([[True, True], [True, False]])
    hard = prune(state, torch.tensor([[2, 0], [1, 3]]), valid=valid)
    pooled, after = hard.apply(x, state)
    assert after.source.tolist() == [[0, 2, -1, 1, -1], [0, -1, 1, -1, -1]]
    assert after.lost
    assert after.mask is not None
    assert after.mask.tolist() == [[True, True, True], [True, True, False]]
    assert torch.equal(pooled[1, :2], x[1, [0, 2]])
    # as many slots as there were tokens, but one image does not keep its last
    everything = prune(state, torch.tensor([[0, 1, 2, 3]] * 2), valid=torch.tensor([[True] * 4, [True] * 3 + [False]]))
    assert everything.advance(x, state).lost
    # a later selection of the same number everywhere keeps the mask
    later = prune(after, torch.tensor([[1], [1]])).advance(pooled, after)
    assert later.mask is not None
    assert later.mask.tolist() == [[True, True], [True, False]]
    assert later.source.tolist() == [[0, 1, -1, -1, -1], [0, -1, -1, -1, -1]]


@given(case=cases)
def test_the_maximum_of_a_group_is_per_channel(case: Case) -> None:
    x = case.tokens()
    state = case.start(x)
    for hard in (case.merge(state), ragged_merge(case, state)):
        pooled = replace(hard, maximum=True).pool(x, state.size)
        for image in range(case.batch):
            for slot, group in enumerate(members(hard, image)):
                assert not group or torch.equal(pooled[image, slot], x[image, group].amax(0))


# ---- prune and the bank --------------------------------------------------------------------------------------------


@given(case=cases)
def test_pruning_keeps_the_order_asked_for_and_marks_the_rest(case: Case) -> None:
    x = case.tokens()
    state = case.start(x)
    keep = case.order(state.num_patches)[:, : case.count(state.num_patches)]
    pooled, after = prune(state, keep).apply(x, state)
    assert torch.equal(pooled[:, : case.prefix], x[:, : case.prefix])
    assert torch.equal(pooled[:, case.prefix :], take(x[:, case.prefix :], keep))
    assert after.lost == (keep.shape[1] < state.num_patches)
    assert after.uniform
    assert_consistent(after)
    kept = torch.zeros(case.batch, case.n, dtype=torch.bool).scatter_(1, after.position, True)
    assert torch.equal(after.source >= 0, kept)
    assert torch.equal(unmerge(pooled, after), x * kept[..., None])


@given(case=cases, rounds=st.integers(1, 4))
def test_refill_brings_every_banked_token_back(case: Case, rounds: int) -> None:
    x0 = x = case.tokens()
    state = case.start(x)
    for _ in range(rounds):
        order, count = case.order(state.num_patches), case.count(state.num_patches)
        x, state = prune(state, order[:, :count], dropped=order[:, count:]).apply(x, state)
        assert not state.lost
        assert state.pruned
        assert_consistent(state)
    x, state = state.refill(x)
    assert x.shape == x0.shape
    assert not state.pruned
    assert state.bank == ()
    assert torch.equal(state.source.sort(1).values, torch.arange(case.n).expand(case.batch, -1))
    assert_consistent(state)
    assert (state.size == 1).all()
    assert torch.equal(unmerge(x, state), x0)


def test_tokens_neither_kept_nor_banked_stay_lost_after_the_refill() -> None:
    x = torch.randn(1, 6, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    y, after = prune(state, torch.tensor([[4, 1]]), dropped=torch.tensor([[0]])).apply(x, state)
    y, after = after.refill(y)
    assert after.lost
    assert after.source.tolist() == [[0, 3, 2, -1, -1, 1]]
    assert unmerge(y, after)[0, 3].eq(0).all()
    assert torch.equal(unmerge(y, after)[0, [0, 1, 2, 5]], x[0, [0, 1, 2, 5]])


def test_refill_brings_merged_tokens_back_with_all_their_members() -> None:
    x = torch.randn(1, 6, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    merging = merge(state, torch.tensor([[0, 1, 3, 4]]), torch.tensor([[2]]), torch.tensor([[1]]))
    y, state = merging.apply(x, state)
    before = unmerge(y, state)
    y, state = prune(state, torch.tensor([[0, 2, 3]]), dropped=torch.tensor([[1]])).apply(y, state)
    y, state = state.refill(y)
    assert state.size.tolist() == [[1.0, 1.0, 1.0, 1.0, 2.0]]
    assert state.source.tolist() == [[0, 1, 4, 4, 2, 3]]
    assert torch.equal(unmerge(y, state), before)


def test_refill_without_a_bank_changes_nothing() -> None:
    x = torch.randn(1, 4, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    assert state.refill(x) == (x, state)


def test_refill_brings_the_carry_back() -> None:
    x = torch.randn(1, 4, CHANNELS)
    state = replace(TokenState.start(x, num_prefix=1), carry={"score": torch.tensor([[9.0, 1.0, 2.0, 3.0]])})
    state = prune(state, torch.tensor([[1]]), dropped=torch.tensor([[2, 0]])).advance(x, state)
    assert state.carry["score"].tolist() == [[9.0, 2.0]]
    _, state = state.refill(x[:, :2])
    assert state.carry["score"].tolist() == [[9.0, 2.0, 3.0, 1.0]]


@pytest.mark.parametrize("what", ["carry", "mask"])
def test_refill_refuses_what_it_cannot_bring_back(what: str) -> None:
    x = torch.randn(1, 4, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    state = prune(state, torch.tensor([[0]]), dropped=torch.tensor([[1, 2]])).advance(x, state)
    extra = {"carry": {"score": torch.zeros(1, 2)}} if what == "carry" else {"mask": torch.ones(1, 2, dtype=torch.bool)}
    with pytest.raises(NotImplementedError, match="cannot be brought back"):
        replace(state, **extra).refill(x[:, :2])


# ---- soft ----------------------------------------------------------------------------------------------------------


@given(case=cases, own_values=st.booleans(), merged_before=st.booleans())
def test_soft_mixes_patches_keeps_the_prefix_and_the_sum_of_sizes(
    case: Case, own_values: bool, merged_before: bool
) -> None:
    x = case.tokens()
    state = case.start(x)
    if merged_before:
        x, state = case.merge(state).apply(x, state)
    count = case.count(state.num_patches)
    matrix = torch.rand(case.batch, count, state.num_patches, generator=case.random, dtype=torch.float64).softmax(-1)
    values = torch.rand(case.batch, state.num_patches, CHANNELS, generator=case.random, dtype=torch.float64)
    y, after = Soft(matrix, values if own_values else None).apply(x, state)
    p = case.prefix
    assert y.shape == (case.batch, p + count, CHANNELS)
    assert torch.equal(y[:, :p], x[:, :p])
    torch.testing.assert_close(y[:, p:], torch.einsum("bmp,bpc->bmc", matrix, values if own_values else x[:, p:]))
    torch.testing.assert_close(after.size.sum(1), torch.full((case.batch,), float(case.n), dtype=torch.float64))
    assert (after.size[:, :p] == 1).all()
    assert torch.equal(after.source[:, :p], torch.arange(p).expand(case.batch, -1))
    assert torch.equal(after.position[:, :p], torch.arange(p).expand(case.batch, -1))
    assert after.source.min() >= 0
    assert after.source.max() < after.num_tokens
    assert not after.uniform
    assert after.reduced


@given(case=cases)
def test_soft_with_one_place_per_token_is_the_merge(case: Case) -> None:
    x = case.tokens()
    state = case.start(x)
    hard = case.merge(state)
    target = hard.target(case.n)[:, case.prefix :] - case.prefix
    count = hard.anchor.shape[1] - case.prefix
    onto = torch.nn.functional.one_hot(target, count).transpose(1, 2).double()
    y, after = Soft(onto / onto.sum(2, keepdim=True)).apply(x, state)
    expected, hard_after = hard.apply(x, state)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(after.size, hard_after.size)
    assert torch.equal(after.source, hard_after.source)


def test_soft_leaves_pruned_tokens_pruned() -> None:
    x = torch.randn(1, 5, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    y, state = prune(state, torch.tensor([[3, 1]])).apply(x, state)
    _, after = Soft(torch.tensor([[[0.2, 0.8]]])).apply(y, state)
    assert after.source.tolist() == [[0, -1, 1, -1, 1]]
    assert after.position.tolist() == [[0, 2]]  # the patch with the largest weight
    assert after.pruned


@pytest.mark.parametrize("what", ["carry", "mask", "bank"])
def test_soft_refuses_what_it_cannot_move(what: str) -> None:
    x = torch.randn(1, 4, CHANNELS)
    state = TokenState.start(x, num_prefix=1)
    extra = {
        "carry": {"carry": {"score": torch.zeros(1, 4)}},
        "mask": {"mask": torch.ones(1, 4, dtype=torch.bool)},
        "bank": {"bank": ((x[:, :1], torch.zeros(1, 1, dtype=torch.long)),)},
    }[what]
    with pytest.raises(NotImplementedError, match="a soft assignment cannot move"):
        Soft(torch.full((1, 2, 3), 1 / 3)).apply(x, replace(state, **extra))


# ---- gradients and half precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_of_pooling(normalise: bool, ragged: bool) -> None:
    case = Case(n=9, prefix=1, batch=2, share=0.4, seed=4)
    x, weight = case.tokens(), torch.rand(2, 9, dtype=torch.float64) + 0.5
    state = case.start(x)
    hard = ragged_merge(case, state) if ragged else case.merge(state)

    def pool(x: Tensor, weight: Tensor) -> Tensor:
        return replace(hard, weight=weight, normalise=normalise).pool(x, state.size)

    assert torch.autograd.gradcheck(pool, (x.requires_grad_(), weight.requires_grad_()))


def test_gradients_of_a_soft_assignment() -> None:
    x = torch.randn(2, 7, CHANNELS, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 5, CHANNELS, dtype=torch.float64, requires_grad=True)
    state = TokenState.start(x, num_prefix=2)
    assert torch.autograd.gradcheck(lambda x, m: Soft(m.softmax(-1)).apply(x, state)[0], (x, logits))
    assert torch.autograd.gradcheck(lambda v, m: Soft(m.softmax(-1), v).apply(x, state)[0], (values, logits))


@given(case=cases)
def test_bfloat16_pools_close_to_float32(case: Case) -> None:
    x = case.tokens(torch.bfloat16)
    state = case.start(x)
    hard = case.merge(state)
    half, full = hard.pool(x, state.size), hard.pool(x.float(), state.size)
    assert half.dtype == torch.bfloat16
    assert state.size.dtype == torch.float32
    # the shares are float32; the sum is rounded to bfloat16 (8 bits) for every token that joins
    torch.testing.assert_close(half.float(), full, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_exported_graphs_pool_groups_by_weight(
    dtype: torch.dtype, weighted: bool, normalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As loops of Python, image by image; what nothing joins comes out as it was, in half precision too."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(compiled, "INSTALLED", False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 5, generator=generator).to(dtype)
    state = TokenState.start(x, 1)
    state = replace(state, size=torch.randint(1, 8, (2, 9), generator=generator).to(state.size.dtype), uniform=False)
    weight = torch.rand(2, 9, generator=generator).to(state.size.dtype) if weighted else None
    keep, moved = torch.tensor([[0, 3, 5, 7], [7, 1, 2, 3]]), torch.tensor([[1, 2, 6], [6, 5, 0]])
    into = torch.tensor([[3, 1, 1], [0, 2, 2]])
    hard = merge(state, keep, moved, into, weight=weight, normalise=normalise)
    reduced, after = hard.apply(x, state)
    torch.testing.assert_close(hard.pool(x, state.size), reduced)
    assert reduced.dtype == dtype
    share = state.size if weight is None else weight
    for image in range(2):
        groups = [[0], *([place + 1] for place in keep[image].tolist())]
        for source, place in zip(moved[image].tolist(), into[image].tolist(), strict=True):
            groups[place + 1].append(source + 1)
        for place, group in enumerate(groups):
            assert after.size[image, place] == sum(state.size[image, token] for token in group)
            total = sum(share[image, token].double() * x[image, token].double() for token in group)
            if normalise:
                total = total / sum(share[image, token].double() for token in group)
            near = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}  # rounded for every token that joins
            torch.testing.assert_close(reduced[image, place], total.to(dtype), **near)
            if normalise and len(group) == 1 and dtype == torch.bfloat16:
                assert torch.equal(reduced[image, place], x[image, group[0]])


@pytest.mark.parametrize("banking", [False, True])
def test_images_may_join_different_numbers_of_those_that_leave(banking: bool) -> None:
    """The others are gone; where places are read, all that leave come back as they were."""
    x = torch.arange(20.0, dtype=torch.float64).view(2, 5, 2).square()
    state = replace(TokenState.start(x, 1, banking=banking), size=torch.full((2, 5), 2.0, dtype=torch.float64))
    state = replace(state, size=state.size * torch.tensor([1.0, 1.0, 1.0, 3.0, 1.0], dtype=torch.float64))
    keep, moved = torch.tensor([[0, 1], [3, 1]]), torch.tensor([[2, 3], [0, 2]])
    hard = merge(state, keep, moved, torch.tensor([[1, 2], [2, 2]]), ragged=True)
    reduced, after = hard.apply(x, state)
    torch.testing.assert_close(reduced[0, 2], (x[0, 2] + 3 * x[0, 3]) / 4)
    assert torch.equal(reduced[0, :2], x[0, :2])
    assert torch.equal(reduced[1], x[1, [0, 4, 2]])
    torch.testing.assert_close(hard.pool(x, state.size), reduced)
    assert after.size.tolist() == [[2.0, 2.0, 8.0], [2.0, 2.0, 2.0]]
    assert after.mask is None
    assert not after.uniform
    if not banking:
        assert after.source.tolist() == [[0, 1, 2, 2, -1], [0, -1, 2, -1, 1]]
        assert hard.expand(reduced, 5)[0, 4].tolist() == [0.0, 0.0]
        assert after.pruned
        assert after.lost
        assert not unmerge(reduced, after)[1, [1, 3]].any()
        return
    assert after.source.tolist() == [[0, 1, 2, -1, -1], [0, -1, 2, -1, 1]]
    assert not after.lost
    whole, back = after.bring_back(reduced)
    places = unmerge(whole, back)
    assert torch.equal(places[0, [3, 4]], x[0, [3, 4]])
    assert torch.equal(places[1, [1, 3]], x[1, [1, 3]])
