"""Checks against the reference vectors that methods with learned parameters, soft tokens or clusters share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import golden_models as golden
import vitrim


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
    name: str, config: vitrim.MethodConfig, rename: Mapping[str, str], prefix: str = "cluster_layers.{}.", **kwargs: Any
) -> tuple[dict[str, Any], nn.Module, vitrim.Reduction]:
    """Reference file, reduced float64 model with the reference's parameters, handle."""
    ref = golden.load(name)
    model = golden.vit(ref, **kwargs)
    reduction = vitrim.reduce_(model, config, record=True)
    stages = {block: prefix.format(stage) for stage, block in enumerate(ref["config"]["args"]["blocks"])}
    has_parameters = any(name.startswith(prefix.format(0)) for name, _ in ref["params"])
    if has_parameters:
        load_reducers(model, ref, stages, rename)
    return ref, model, reduction


def check_outputs(ref: dict[str, Any], model: nn.Module, reduction: vitrim.Reduction, lengths: bool = True) -> None:
    """Logits, lengths and the class token after every block, in float64; logits in float32."""
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, out: found.append(out[:, 0])) for block in model.blocks]
    with torch.no_grad():
        logits = model(golden.images(ref))
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(logits, golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    if lengths:
        assert reduction.tokens_per_block == ref["tokens_per_block"].tolist()
    for depth, (token, expected) in enumerate(zip(found, golden.tensor(ref, "cls_per_block").double(), strict=True)):
        atol = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(token, expected, atol=atol, rtol=0, msg=f"class token after block {depth}")


def check_float32(ref: dict[str, Any], model: nn.Module) -> None:
    """Logits of a float32 run; the model is float32 afterwards."""
    with torch.no_grad():
        logits = model.float()(golden.images(ref).float())
    torch.testing.assert_close(logits, golden.tensor(ref, "logits_f32"), atol=5e-5, rtol=0)


def check_assignments(ref: dict[str, Any], reduction: vitrim.Reduction) -> None:
    """``assign/<block>``: the new place of every patch that entered the stage, composed over the stages."""
    group = None
    for block in ref["config"]["args"]["blocks"]:
        if f"assign/{block}" not in ref:
            return
        step = golden.tensor(ref, f"assign/{block}").long()
        group = step if group is None else step.gather(1, group)
        assert torch.equal(reduction.states[block + 1].source[:, 1:] - 1, group), block


def check_kept(ref: dict[str, Any], reduction: vitrim.Reduction, ordered: bool = True) -> None:
    """``kept_abs/<block>``: original patches in the order in which they are kept."""
    for key in ref:
        if key.startswith("kept_abs/"):
            found = reduction.states[int(key.split("/")[1]) + 1].position[:, 1:] - 1
            expected = golden.tensor(ref, key).long()
            if not ordered:
                found, expected = found.sort(1).values, expected.sort(1).values
            assert torch.equal(found, expected), key


def check_soft(ref: dict[str, Any], model: nn.Module) -> None:
    """``soft/<block>``: the weights of image 0, every few rows."""
    matrices: dict[int, Tensor] = {}
    hooks = [
        block.reducer.register_forward_hook(lambda m, i, out: matrices.__setitem__(m.layer.depth, out.matrix))
        for block in (model.blocks[depth] for depth in ref["config"]["args"]["blocks"])
    ]
    with torch.no_grad():
        model(golden.images(ref))
    for hook in hooks:
        hook.remove()
    for depth, matrix in matrices.items():
        expected = golden.tensor(ref, f"soft/{depth}").double()
        stride = ref["config"]["soft_row_stride"][str(depth)]
        atol = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(matrix[0, ::stride], expected, atol=atol, rtol=0)


def check_gradients(
    ref: dict[str, Any], model: nn.Module, names: Mapping[str, str], key: str = "", skip: Sequence[str] = ()
) -> None:
    """Norms of all gradients and the stored gradients; ``names`` maps the beginning of an official name to ours."""
    own = dict(model.named_parameters())

    def gradient(name: str) -> Tensor:
        old = max((old for old in names if name.startswith(old)), key=len, default="")
        grad = own[names.get(old, "") + name.removeprefix(old)].grad
        return torch.zeros(()) if grad is None else grad

    listed = [name for name in ref[f"{key}gradnorm_names"] if name not in skip]
    norms = torch.stack([gradient(name).double().norm() for name in listed])
    keep = [name not in skip for name in ref[f"{key}gradnorm_names"]]
    expected = golden.tensor(ref, f"{key}gradnorm")[torch.tensor(keep)]
    torch.testing.assert_close(norms, expected, atol=1e-9, rtol=1e-9)
    for entry in ref:
        name = entry.removeprefix(f"{key}grad/")
        if name != entry and name not in skip:
            stored = golden.tensor(ref, entry).double()
            atol = 2e-6 * stored.abs().max().item() + 1e-12
            torch.testing.assert_close(gradient(name).double(), stored, atol=atol, rtol=0, msg=name)


def cross_entropy_backward(ref: dict[str, Any], model: nn.Module) -> Tensor:
    """Mean cross entropy in training mode, after its backward."""
    logits = model.train()(golden.images(ref))
    torch.testing.assert_close(logits, golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    loss = nn.functional.cross_entropy(logits, torch.tensor(ref["config"]["targets"]))
    loss.backward()
    return loss
