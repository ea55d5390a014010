from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import vitrim.core.attention
from vitrim.core.attention import Attention, KnownMap, unfused_is_faster

BATCH, HEADS, N, DIM = 2, 3, 11, 4
BIASES = ["none", "keys", "full"]
every_bias = pytest.mark.parametrize("bias", BIASES)


def make(bias: str = "none", dtype: torch.dtype = torch.float64, seed: int = 0, **options: object) -> Attention:
    """Attention over random tokens; ``bias``: "none", "keys" (B, 1, 1, N) or "full" (B, H, N, N)."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    q, k, v = (draw(BATCH, HEADS, N, DIM) for _ in range(3))
    shapes = {"none": None, "keys": (BATCH, 1, 1, N), "full": (BATCH, HEADS, N, N)}
    shape = shapes[bias]
    return Attention(q, k, v, 0.6, bias=None if shape is None else draw(*shape), **options)


def explicit_map(attention: Attention) -> Tensor:
    """(B, H, N, N) softmax written out, in float64."""
    logits = torch.einsum("bhqd,bhkd->bhqk", attention.q.double(), attention.k.double()) * attention.scale
    weights = (logits if attention.bias is None else logits + attention.bias.double()).exp()
    return weights / weights.sum(-1, keepdim=True)


def explicit_output(attention: Attention) -> Tensor:
    assert attention.v is not None
    return torch.einsum("bhqk,bhkd->bhqd", explicit_map(attention), attention.v.double())


# ---- output --------------------------------------------------------------------------------------------------------


@every_bias
@pytest.mark.parametrize("fused", [True, False])
def test_output_is_the_softmax_written_out(bias: str, fused: bool) -> None:
    attention = make(bias, fused=fused)
    torch.testing.assert_close(attention.output(), explicit_output(attention), atol=1e-12, rtol=1e-12)


@every_bias
@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_every_kernel_is_close_in_bfloat16(
    bias: str, has_bfloat16: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitrim.core.attention, "CPU_HAS_BFLOAT16", has_bfloat16)
    monkeypatch.setattr(vitrim.core.attention, "CPU_HAS_AMX", False)
    attention = make(bias, torch.bfloat16, fused=fused)
    out = attention.output()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), explicit_output(attention), atol=0.03, rtol=0.03)


def test_the_kernel_is_chosen_by_device_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bfloat16, has_amx, unfused in ((True, False, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr(vitrim.core.attention, "CPU_HAS_BFLOAT16", has_bfloat16)
        monkeypatch.setattr(vitrim.core.attention, "CPU_HAS_AMX", has_amx)
        small, large = (8, 6, 197, 197), (8, 6, 577, 577)  # of 4 and 32 MB
        assert unfused_is_faster(torch.device("cpu"), torch.bfloat16, *small) is unfused
        assert not unfused_is_faster(torch.device("cpu"), torch.bfloat16, *large)
        for device, dtype in (("cpu", torch.float32), ("cpu", torch.float64), ("cuda", torch.bfloat16)):
            assert not unfused_is_faster(torch.device(device), dtype, *small)


def test_the_kernel_asked_for_is_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fused_kernel(q: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append(kwargs)
        return q

    monkeypatch.setattr(vitrim.core.attention.F, "scaled_dot_product_attention", fused_kernel)
    make(fused=False).output()
    assert calls == []
    attention = make("keys", fused=True, dropout=0.25)
    attention.output()
    assert len(calls) == 1
    assert calls[0]["scale"] == 0.6
    assert calls[0]["dropout_p"] == 0.25
    assert calls[0]["attn_mask"] is attention.bias


def test_dropout_of_the_unfused_kernel_acts_on_the_map() -> None:
    assert (make(fused=False, dropout=1.0).output() == 0).all()
    dropped = torch.stack([make(fused=False, dropout=0.5).output() for _ in range(400)])
    torch.testing.assert_close(dropped.mean(0), make().output(), atol=0.25, rtol=0)
    assert dropped.std(0).max() > 0.1


def test_gradients_of_the_kernels_agree() -> None:
    grads = []
    for fused in (True, False):
        attention = make("keys", fused=fused)
        leaves = [part.requires_grad_() for part in (attention.q, attention.k, attention.v)]
        grads.append(torch.autograd.grad(attention.output().square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_values_that_are_not_projected_yet_are_refused() -> None:
    attention = make()
    with pytest.raises(RuntimeError, match="have not been projected"):
        Attention(attention.q, attention.k, None, attention.scale).output()


def test_other_values_come_flat_with_heads_side_by_side() -> None:
    attention = make("keys")
    assert attention.v is not None
    flat = attention.v.transpose(1, 2).reshape(BATCH, N, HEADS * DIM)
    torch.testing.assert_close(attention.with_values(2 * flat).output(), 2 * attention.output())


# ---- some query rows only ------------------------------------------------------------------------------------------


@every_bias
@pytest.mark.parametrize("fused", [True, False])
@given(count=st.integers(1, N))
def test_rows_are_the_first_rows_of_the_full_output(bias: str, fused: bool, count: int) -> None:
    attention = make(bias, fused=fused)
    rows = attention.rows(count)
    torch.testing.assert_close(rows.output(), attention.output()[:, :, :count], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(rows.probabilities(), attention.probabilities()[:, :, :count], atol=1e-12, rtol=1e-12)


@every_bias
@pytest.mark.parametrize("fused", [True, False])
@given(count=st.integers(1, N), seed=st.integers(0, 1000))
def test_select_gives_the_rows_asked_for(bias: str, fused: bool, count: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(N, generator=random)[:count] for _ in range(BATCH)])
    attention = make(bias, fused=fused)
    chosen = attention.select(index)
    full = attention.output()
    expected = torch.stack([full[image][:, index[image]] for image in range(BATCH)])
    torch.testing.assert_close(chosen.output(), expected, atol=1e-12, rtol=1e-12)
    assert chosen.queries is index
    # a selection of a selection still names the original tokens
    again = chosen.select(torch.zeros(BATCH, 1, dtype=torch.long)).rows(1)
    assert torch.equal(again.queries, index[:, :1])
    torch.testing.assert_close(again.output(), expected[:, :, :1], atol=1e-12, rtol=1e-12)


# ---- what methods ask for ------------------------------------------------------------------------------------------


@every_bias
def test_class_row_and_column_mean_are_parts_of_the_map(bias: str) -> None:
    attention = make(bias)
    expected = explicit_map(attention)
    torch.testing.assert_close(attention.probabilities(), expected, atol=1e-12, rtol=1e-12)
    assert attention.class_row().shape == (BATCH, HEADS, N)
    torch.testing.assert_close(attention.class_row(), expected[:, :, 0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(attention.class_mean(), expected[:, :, 0].mean(1), atol=1e-12, rtol=1e-12)
    assert attention.column_mean().shape == (BATCH, N)
    torch.testing.assert_close(attention.column_mean(), expected.sum((1, 2)) / (HEADS * N), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(attention.column_mean().sum(1), torch.ones(BATCH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_decisions_are_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    attention = make("keys", dtype)
    for decision in (
        attention.mean_keys(),
        attention.class_row(),
        attention.column_mean(),
        attention.probabilities(),
    ):
        assert decision.dtype == expected
    # the mean itself is taken in the wider dtype, not rounded and then widened
    assert torch.equal(attention.mean_keys(), attention.k.to(expected).mean(1))
    # so is the softmax: rows sum to one far closer than bfloat16 could
    ones = torch.ones(BATCH, HEADS, N, dtype=expected)
    torch.testing.assert_close(attention.probabilities().sum(-1), ones, atol=1e-6, rtol=0)


def test_matching_compares_keys_before_rotary_embedding() -> None:
    before = torch.randn(BATCH, HEADS, N, DIM, dtype=torch.float64)
    attention = make(k_raw=before)
    assert torch.equal(attention.mean_keys(), before.mean(1))
    torch.testing.assert_close(attention.output(), make().output())  # attention itself does not
    assert torch.equal(make().keys, make().k)


def test_detach_cuts_decisions_off_the_graph() -> None:
    attention = make()
    attention.q.requires_grad_()
    attention.k.requires_grad_()
    assert attention.class_row().requires_grad
    detached = attention.detach()
    assert not detached.class_row().requires_grad
    assert not detached.column_mean().requires_grad
    assert not detached.mean_keys().requires_grad
    assert torch.equal(detached.class_row(), attention.class_row())


@pytest.mark.parametrize("budget", [0, 2 * BATCH * N * N * 8, 10**9])
def test_column_means_do_not_depend_on_how_many_heads_are_taken_at_once(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vitrim.core.attention.MAP_BYTES, "cpu", budget)
    attention = make("full")
    expected = explicit_map(attention).mean(dim=(1, 2))
    torch.testing.assert_close(attention.column_mean(), expected, atol=1e-12, rtol=1e-12)


def test_a_learned_bias_gets_no_gradient_from_decisions() -> None:
    attention = make("full")
    attention.bias.requires_grad_()
    assert attention.column_mean().requires_grad
    assert not attention.detach().column_mean().requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_known_map_changes_nothing_but_the_cost(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 3, 11, 4, dtype=torch.float64).to(dtype)
    attention = Attention(q, k, v, 0.6, bias=torch.randn(2, 1, 1, 11).to(dtype))
    reads = ("output", "probabilities", "class_row", "column_mean")
    expected = [getattr(each, read)() for each in (attention, attention.rows(4)) for read in reads]
    known = KnownMap.of(attention)
    monkeypatch.setattr(Attention, "logits", None)  # nothing may compute it again
    found = [getattr(each, read)() for each in (known, known.rows(4)) for read in reads]
    # the map itself is at least float32; its product with the values is in their dtype
    close = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 0.02, "rtol": 0.02}
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **close)
    part = known.narrow(0, 1, 1)
    assert part.v is None
    assert torch.equal(part.probabilities(), known.probabilities()[1:])
    assert torch.equal(known.narrow(1, 1, 2).probabilities(), known.probabilities()[:, 1:])
    monkeypatch.undo()
    q.requires_grad_()
    assert KnownMap.of(attention).column_mean().requires_grad
    assert not KnownMap.of(attention).detach().column_mean().requires_grad
