"""What must hold for every method at every number of patches: 5 to 700, odd and even, on grids of any form.

Models are small and every pixel is a patch. Tokens may be distinct, alike in places or all the same, because ties are
where a count or a group goes wrong. What an assignment does is tested in `test_assignment.py`; here the methods decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import tiny
import vitrim
from vitrim.core.tokens import TokenState, take
from vitrim.methods.fixed_radial import FixedRadial

T = TypeVar("T")

DEPTH = 4
BATCH = 2
FEW = settings(deadline=None, max_examples=5 if tiny.FULL_MATRIX else 3, suppress_health_check=[HealthCheck.too_slow])

every_method = pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())


@dataclass(frozen=True)
class Case:
    """A host and its images."""

    grid: tuple[int, int]
    prefix: int
    content: str
    seed: int

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def model(self, **options: object) -> VisionTransformer:
        """Depth 4, with so many prefix tokens: the first is a class token, the others registers."""
        torch.manual_seed(self.seed)
        pool = {"class_token": True, "reg_tokens": self.prefix - 1} if self.prefix else NO_CLASS_TOKEN
        model = VisionTransformer(
            img_size=self.grid,
            patch_size=1,
            in_chans=2,
            num_classes=3,
            embed_dim=16,
            depth=DEPTH,
            num_heads=2,
            **pool,
            **options,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if self.content != "distinct":
                model.pos_embed.zero_()
        return model.eval()

    def images(self, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, 2, rows, columns); alike: of three colours, identical: of one."""
        random = torch.Generator().manual_seed(self.seed)
        shape = (BATCH, 2, *(grid or self.grid))
        if self.content == "distinct":
            return torch.randn(shape, generator=random)
        colours = torch.randn(3 if self.content == "alike" else 1, generator=random)
        return colours[torch.randint(len(colours), shape, generator=random)]


NO_CLASS_TOKEN = {"class_token": False, "global_pool": "avg"}


def divisor_pairs(n: int) -> list[tuple[int, int]]:
    return [(rows, n // rows) for rows in range(1, n + 1) if n % rows == 0]


squares = st.integers(3, 26).map(lambda side: (side, side))
rectangles = st.integers(5, 700).flatmap(lambda n: st.sampled_from(divisor_pairs(n)))
contents = st.sampled_from(["distinct", "distinct", "alike", "identical"])
seeds = st.integers(0, 2**31)
plain_cases = st.builds(Case, grid=squares, prefix=st.sampled_from([1, 1, 4]), content=contents, seed=seeds)
cases = st.builds(Case, grid=rectangles, prefix=st.sampled_from([0, 1, 1, 3]), content=contents, seed=seeds)


def run(model: VisionTransformer, reduction: vitrim.Reduction, images: Tensor) -> list[tuple[Tensor, TokenState]]:
    """Tokens and state after every block."""
    tokens: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda module, given, out: tokens.append(out)) for block in model.blocks]
    with torch.no_grad():
        out = model(images)
    for hook in hooks:
        hook.remove()
    assert out.isfinite().all()
    return list(zip(tokens, reduction.states[1:], strict=True))


def reduced(model: VisionTransformer, config: vitrim.MethodConfig) -> vitrim.Reduction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrim.ReductionWarning)  # r = 4 asks for more than 5 patches allow
        return vitrim.reduce_(model, config, record=True)


# ---- the invariants --------------------------------------------------------------------------------------------------


def assert_invariants(config: vitrim.MethodConfig, initial: int, found: list[tuple[Tensor, TokenState]]) -> None:
    # only these keep another number of the same patches on another grid
    counts = (
        config.counts(initial, DEPTH, grid=found[0][1].grid)
        if isinstance(config, FixedRadial | vitrim.CubistMerge)
        else config.counts(initial, DEPTH)
    )
    if counts is not None:
        assert [state.num_patches for _, state in found] == counts
    for depth, (x, state) in enumerate(found):
        assert 1 <= state.num_patches <= initial or config.is_adaptive()
        assert_prefix_untouched(state)
        if state.mixed:
            total = torch.full((BATCH,), float(state.source.shape[1]))
            torch.testing.assert_close(state.size.sum(1), total, rtol=1e-4, atol=0.0)
            continue
        assert_sizes_and_source_agree(config, state)
        if depth < DEPTH - 1:  # the last block may hand out less, or everything un-merged
            assert_groups_unmerge_to_one_value(x, state)


def assert_prefix_untouched(state: TokenState) -> None:
    p = state.num_prefix
    first = torch.arange(p).expand(BATCH, p)
    assert torch.equal(state.position[:, :p], first)
    assert torch.equal(state.source[:, :p], first)
    assert (state.size[:, :p] == 1).all()


def assert_sizes_and_source_agree(config: vitrim.MethodConfig, state: TokenState) -> None:
    """The size of a token is the number of input tokens whose source it is, so sizes sum to those that survive."""
    real = torch.ones_like(state.size, dtype=torch.bool) if state.mask is None else state.mask
    alive = state.source >= 0
    held = torch.zeros_like(state.size).scatter_add(1, state.source.clamp_min(0), alive.to(state.size.dtype))
    p = state.num_prefix  # a prefix token that has halted is masked and still there
    assert ((held > 0) == real)[:, p:].all()
    # published: similarities make sizes smaller, or background counts for nothing
    if not (getattr(config, "discount_sizes", False) or isinstance(config, vitrim.VidTLDR)):
        assert torch.equal(held[:, p:][real[:, p:]], state.size[:, p:][real[:, p:]])
    assert (state.size > 0).all()
    assert alive.all() or state.pruned
    assert alive.all() or config.kind != "merge"
    assert (state.size == 1).all() or not state.uniform


def assert_groups_unmerge_to_one_value(x: Tensor, state: TokenState) -> None:
    """Un-merged, all members of a group have the value of its anchor, and taking the anchors gives the tokens back."""
    grid, alive = vitrim.unmerge(x, state), state.source >= 0
    anchor = state.position.gather(1, state.source.clamp_min(0))
    assert torch.equal(take(grid, anchor)[alive], grid[alive])
    assert (grid[~alive] == 0).all()
    real = torch.ones_like(state.size, dtype=torch.bool) if state.mask is None else state.mask
    real = real | (torch.arange(state.num_tokens) < state.num_prefix)
    assert torch.equal(take(grid, state.position)[real], x[real])


# ---- methods on hosts ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@every_method
@FEW
@given(case=plain_cases)
def test_every_method_works_on_square_images_with_a_class_token(config: vitrim.MethodConfig, case: Case) -> None:
    model = case.model()
    reduction = reduced(model, config)
    assert_invariants(config, case.patches, run(model, reduction, case.images()))


def unless_refused(call: Callable[[], T]) -> T | None:
    """What ``call`` returns, or None if it is refused."""
    with suppress(vitrim.VitrimError):
        return call()
    return None


@pytest.mark.sampled(3)
@every_method
@FEW
@given(case=cases)
@example(case=Case((1, 5), prefix=0, content="alike", seed=1))  # down to one patch
def test_every_method_works_or_refuses_before_it_runs(config: vitrim.MethodConfig, case: Case) -> None:
    model = case.model()
    reduction = unless_refused(lambda: reduced(model, config))
    if reduction is None:
        assert not any(hasattr(block, "reducer") for block in model.blocks)
    else:
        assert_invariants(config, case.patches, run(model, reduction, case.images()))


@pytest.mark.sampled(3)
@every_method
@FEW
@given(case=plain_cases, other=rectangles)
def test_images_of_another_size_work_or_are_refused(
    config: vitrim.MethodConfig, case: Case, other: tuple[int, int]
) -> None:
    small = replace(case, grid=(6, 6))
    model = small.model(dynamic_img_size=True)
    reduction = reduced(model, config)
    found = unless_refused(lambda: run(model, reduction, small.images(other)))
    if found is None:
        assert config.kind == "soft"  # has parameters for one number of patches
    else:
        assert_invariants(config, other[0] * other[1], found)
    assert_invariants(config, 36, run(model, reduction, small.images()))  # a refusal leaves the model as it was
