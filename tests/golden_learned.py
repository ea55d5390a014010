"""Checks against the reference vectors that many methods share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import golden_models as golden
import vitrim
from vitrim.core import compiled


def load_reducers(
    model: nn.Module, ref: dict[str, Any], prefixes: Mapping[int, str], rename: Mapping[str, str]
) -> None:
    """Copy reference parameters called ``prefixes[block]`` + name into the reducer of each block.

    ``rename`` maps the beginning of an official name to ours. Every parameter of these reducers must be given.
    """
    weights = golden.published(ref)
    for block, prefix in prefixes.items():
        given = {}
        for name, value in weights.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                old = max((old for old in rename if key.startswith(old)), key=len, default="")
                given[rename.get(old, "") + key.removeprefix(old)] = value
        model.blocks[block].reducer.load_state_dict(given, strict=True)


def reduced(
    ref: golden.Reference,
    config: vitrim.MethodConfig,
    rename: Mapping[str, str],
    prefix: str = "cluster_layers.{}.",
    **kwargs: Any,
) -> tuple[nn.Module, vitrim.Reduction]:
    """Reduced float64 model with the parameters of a reference file, handle."""
    model = golden.vit(ref, **kwargs)
    reduction = vitrim.reduce_(model, config, record=True)
    stages = {block: prefix.format(stage) for stage, block in enumerate(ref["config"]["args"]["blocks"])}
    has_parameters = any(name.startswith(prefix.format(0)) for name, _ in ref["params"])
    if has_parameters:
        load_reducers(model, ref, stages, rename)
    return model, reduction


def forward(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the class token after every block (depth, B, C). Loops and operators must agree on both."""
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, out: found.append(out[:, 0])) for block in model.blocks]
    with torch.no_grad():
        with patch.object(compiled, "INSTALLED", False):
            by_operators = model(images), *found
        found.clear()
        logits = model(images)
    for one, other in zip(by_operators, (logits, *found), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-10)
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(found)


def check_outputs(
    ref: golden.Reference, model: nn.Module, reduction: vitrim.Reduction, lengths: bool = True, suffix: str = ""
) -> None:
    """Logits, lengths, the class token after every block, and what is left of which token, in float64."""
    logits, tokens = forward(model, golden.images(ref))
    ref.check(f"logits{suffix}", logits)
    if lengths:
        ref.check("tokens_per_block", reduction.tokens_per_block, torch.Tensor.tolist)
    ref.check(f"cls_per_block{suffix}", tokens)
    if f"source{suffix}" in ref:
        ref.check(f"source{suffix}", reduction.state.source)
        ref.check(f"size{suffix}", reduction.state.size, lambda size: size.view_as(reduction.state.size))


def check_float32(ref: golden.Reference, model: nn.Module, suffix: str = "") -> None:
    """Logits of a float32 run; the model is float32 afterwards."""
    with torch.no_grad():
        ref.check(f"logits_f32{suffix}", model.float()(golden.images(ref).float()))


def check_dense(ref: golden.Reference, **kwargs: Any) -> None:
    """``base_logits``: those of the same model without a reduction."""
    with torch.no_grad():
        ref.check("base_logits", golden.vit(ref, **kwargs)(golden.images(ref)))


def keys(ref: golden.Reference, kind: str) -> dict[int, str]:
    """The arrays called ``kind``/<block>, by block."""
    return {int(key.removeprefix(f"{kind}/")): key for key in ref if key.startswith(f"{kind}/")}


def check_assignments(ref: golden.Reference, reduction: vitrim.Reduction) -> None:
    """``assign/<block>``: the new place of every patch that entered the stage."""
    for block, key in keys(ref, "assign").items():
        ref.check(key, step_of(reduction, block)[:, 1:] - 1)


def step_of(reduction: vitrim.Reduction, block: int) -> Tensor:
    """(B, N) where block ``block`` put each of the tokens that entered it; all tokens of one group go together."""
    before, after = (state.source for state in reduction.states[block : block + 2])
    count = reduction.states[block].num_tokens
    step = torch.full((before.shape[0], count), -2).scatter(1, before, after)
    assert torch.equal(step.gather(1, before), after)
    return step


def check_kept(ref: golden.Reference, reduction: vitrim.Reduction) -> None:
    """``kept_abs/<block>``, the original patches that are left, in their order, and ``kept/<block>``, their places
    among the patches that entered the block; -1 is padding."""
    for block, key in keys(ref, "kept_abs").items():
        ref.check(key, rows(reduction.states[block + 1]), without_padding)
    for block, key in keys(ref, "kept").items():
        ref.check(key, kept_places(reduction, block), without_padding)


def check_kept_sets(ref: golden.Reference, reduction: vitrim.Reduction) -> dict[int, Tensor]:
    """``kept/<block>`` and ``dropped/<block>`` as sets, where the order is decided by near ties: their places are those
    in the published order. Returns that order after each block, (B, P) original patches."""
    orders, published = {}, torch.arange(reduction.states[0].num_patches).expand(len(reduction.state.size), -1)
    for block, key in keys(ref, "kept").items():
        before = published.tolist()
        pairs = zip(before, rows(reduction.states[block + 1]), strict=True)
        kept = [{old.index(patch) for patch in left} for old, left in pairs]
        ref.check(key, kept, as_sets)
        if f"dropped/{block}" in ref:
            gone = [set(range(len(old))) - places for old, places in zip(before, kept, strict=True)]
            ref.check(f"dropped/{block}", gone, as_sets)
        orders[block] = published = published.gather(1, golden.tensor(ref, key).long())
    return orders


def without_padding(table: Tensor) -> list[list[int]]:
    """The rows of a table of indices without -1."""
    return [[entry for entry in row if entry >= 0] for row in table.tolist()]


def as_sets(table: Tensor) -> list[set[int]]:
    """The rows of a table of indices whose order has no meaning, without -1."""
    return [set(row) - {-1} for row in table.tolist()]


def rows(state: vitrim.TokenState) -> list[list[int]]:
    """The original patch of every patch token of each image; padding is left out."""
    position = state.position[:, state.num_prefix :] - state.num_prefix
    real = torch.ones_like(position, dtype=torch.bool) if state.mask is None else state.mask[:, state.num_prefix :]
    return [row[flag].tolist() for row, flag in zip(position, real, strict=True)]


def kept_places(reduction: vitrim.Reduction, block: int) -> list[list[int]]:
    """The places, among the patches that entered ``block``, of those that are left after it."""
    before, after = rows(reduction.states[block]), rows(reduction.states[block + 1])
    return [[old.index(patch) for patch in new] for old, new in zip(before, after, strict=True)]


def caught(model: nn.Module, blocks: Iterable[int], of: Any) -> dict[int, Any]:
    """What ``of(reducer, x, attention, state)`` makes of the decisions of some blocks, as they are taken."""
    found: dict[int, Any] = {}
    for block in blocks:
        reducer = model.blocks[block].reducer
        reducer.register_forward_hook(lambda m, args, out, block=block: found.__setitem__(block, of(m, *args)))
    return found


def check_soft(ref: golden.Reference, model: nn.Module, reduction: vitrim.Reduction) -> None:
    """``soft/<block>``, the weights of image 0, every few rows; ``assign/<block>``, the row that weighs most, also as
    it adds up over the stages."""
    matrices: dict[int, Tensor] = {}
    hooks = [
        block.reducer.register_forward_hook(lambda m, i, out: matrices.__setitem__(m.layer.depth, out.matrix))
        for block in (model.blocks[depth] for depth in ref["config"]["args"]["blocks"])
    ]
    with torch.no_grad():
        model(golden.images(ref))
    for hook in hooks:
        hook.remove()
    group = None
    for depth, matrix in matrices.items():
        stride = ref["config"]["soft_row_stride"][str(depth)]
        ref.check(f"soft/{depth}", matrix[0, ::stride])
        if f"assign/{depth}" in ref:
            ref.check(f"assign/{depth}", matrix.argmax(1))
            step = golden.tensor(ref, f"assign/{depth}").long()
            group = step if group is None else step.gather(1, group)
            assert torch.equal(reduction.states[depth + 1].source[:, 1:] - 1, group), depth


def check_gradients(
    ref: golden.Reference, model: nn.Module, names: Mapping[str, str], key: str = "", skip: Sequence[str] = ()
) -> None:
    """Norms of all gradients and the stored gradients; ``names`` maps the beginning of an official name to ours."""
    own = dict(model.named_parameters())

    def gradient(name: str) -> Tensor | None:
        old = max((old for old in names if name.startswith(old)), key=len, default="")
        return own[names.get(old, "") + name.removeprefix(old)].grad

    listed = ref[f"{key}gradnorm_names"]
    grads = {name: gradient(name) for name in listed}
    norms = [torch.zeros((), dtype=torch.float64) if grad is None else grad.norm() for grad in grads.values()]
    keep = torch.tensor([name not in skip for name in listed])
    ref.check(f"{key}gradnorm", torch.stack(norms)[keep], lambda stored: stored[keep])
    for entry in ref:
        name = entry.removeprefix(f"{key}grad/")
        if name != entry and name not in skip:
            ref.check(entry, gradient(name))
    if f"{key}params_without_grad" in ref:
        without = [name for name, _ in ref["params"] if name not in grads or grads[name] is None]
        ref.check(f"{key}params_without_grad", sorted(without), sorted)


def cross_entropy_backward(ref: golden.Reference, model: nn.Module) -> None:
    """Logits in training mode and mean cross entropy, and its backward; logits in float32."""
    logits = model.train()(golden.images(ref))
    ref.check("logits", logits)
    loss = nn.functional.cross_entropy(logits, torch.tensor(ref["config"]["targets"]))
    ref.check("loss", loss)
    loss.backward()
