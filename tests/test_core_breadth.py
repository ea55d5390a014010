"""The core carries methods far from ToMe: learned soft mixing, a bank, a last fusion.

Each is written here in a few lines against the public interface and compared with its reference vectors, so that a change
of the core that would shut out a kind of method fails at once.
"""

from __future__ import annotations

from typing import Any

import golden_models as golden
import torch
from torch import Tensor, nn

import vitrim
from vitrim.block import Idle
from vitrim.schedule import Amount, Remove, keep_rate


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


# ---- PatchMerger: a soft assignment with its own values, and learned parameters -----------------------------------------


class PatchMerger(vitrim.MethodConfig):
    name = "test_patchmerger"
    kind = "soft"
    rate: float = 0.5
    blocks: tuple[int, ...] = (1, 3, 5)

    def schedule(self, num_layers: int) -> list[Amount | None]:
        return keep_rate(self.rate, self.blocks, "floor_initial_power", num_layers)

    def build(self, layer: vitrim.Layer) -> vitrim.Reducer | None:
        return PatchMergerReducer(self, layer) if layer.depth in self.blocks else None


class PatchMergerReducer(vitrim.Reducer):
    site = "before"

    def __init__(self, config: PatchMerger, layer: vitrim.Layer) -> None:
        super().__init__(config, layer)
        self.queries = nn.Parameter(torch.randn(self.amount.keep(layer.initial_patches, 0), layer.dim))
        self.norm = nn.LayerNorm(layer.dim)

    def assign(self, x: Tensor, attention: Any, state: vitrim.TokenState) -> vitrim.Soft:
        values = self.norm(x[:, state.num_prefix :])
        return vitrim.Soft((self.queries @ values.transpose(-1, -2)).softmax(-1), values)


def test_patchmerger_matches_reference() -> None:
    ref = golden.load("haurum/patchmerger_p64_r50")
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, PatchMerger(), record=True)
    weights = {name: torch.from_numpy(value) for name, value in golden.weights.state(ref).items()}
    with torch.no_grad():
        for stage, block in enumerate((1, 3, 5)):
            reducer = model.blocks[block].reducer
            reducer.queries.copy_(weights[f"cluster_layers.{stage}.queries"])
            reducer.norm.weight.copy_(weights[f"cluster_layers.{stage}.norm.weight"])
            reducer.norm.bias.copy_(weights[f"cluster_layers.{stage}.norm.bias"])
    torch.testing.assert_close(run(model, golden.images(ref)), golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    assert reduction.tokens_per_block == ref["tokens_per_block"].tolist()
    assert torch.allclose(reduction.state.size.sum(1), torch.tensor(65.0, dtype=torch.float64))
    assert [key for key in model.state_dict() if "reducer" in key][0] == "blocks.1.reducer.queries"


def test_learned_parameters_are_saved_without_the_host(tmp_path) -> None:
    ref = golden.load("haurum/patchmerger_p64_r50")
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, PatchMerger())
    reduction.save(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "reducers.safetensors")
    assert sorted(saved) == sorted(f"{d}.{n}" for d in (1, 3, 5) for n in ("queries", "norm.weight", "norm.bias"))
    assert saved["3.queries"].shape == (16, 96)
    assert torch.equal(saved["3.queries"], model.blocks[3].reducer.queries)


# ---- Cropr: routers, auxiliary heads in training only, a bank that the last block brings back --------------------------


class Cropr(vitrim.MethodConfig):
    name = "test_cropr"
    rate: int = 8

    def schedule(self, num_layers: int) -> list[Amount | None]:
        removes = [Remove(self.rate + (depth == 1)) for depth in range(1, num_layers - 1)]
        return [None, *removes, None]

    def build(self, layer: vitrim.Layer) -> vitrim.Reducer:
        if layer.depth == 0:
            return Idle(self, layer)
        return Fusion(self, layer) if layer.depth == layer.num_layers - 1 else Router(self, layer)


class Router(vitrim.Reducer):
    site = "before"

    def __init__(self, config: Cropr, layer: vitrim.Layer) -> None:
        super().__init__(config, layer)
        dim = layer.dim
        self.queries = nn.Parameter(torch.randn(1, 1, dim))
        self.mlp_norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(dim), "head": nn.Linear(dim, layer.num_classes)})

    def reduce(self, site, x, attention, state):
        if site == "before" and self.training:
            seen = x.detach()
            z = ((self.queries @ seen.transpose(-1, -2)) / x.shape[-1] ** 0.5).softmax(-1) @ seen
            z = z + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.mlp_norm(z))))
            state = state.report("logits", self.layer.depth, self.head["head"](self.head["norm"](z))[:, 0])
        return super().reduce(site, x, attention, state)

    def assign(self, x, attention, state):
        score = (x.detach() @ self.queries.detach().sum(1)[..., None])[:, state.num_prefix :, 0]
        order = score.argsort(1, descending=True)
        keep = self.num_keep(state)
        return vitrim.prune(state, order[:, :keep], dropped=order[:, keep:])


class Fusion(vitrim.Reducer):
    def reduce(self, site, x, attention, state):
        return state.refill(x) if site == "before" else (x, state)


def cropr_model(ref: dict[str, Any]) -> tuple[nn.Module, vitrim.Reduction]:
    model = golden.vit(ref, global_pool="avg", pool_include_prefix=True)
    reduction = vitrim.reduce_(model, Cropr(), record=True)
    for name, value in golden.weights.state(ref).items():
        if name.startswith("cropr."):
            _, index, key = name.split(".", 2)
            key = key.removeprefix("cross_attn.")
            with torch.no_grad():
                model.get_submodule(f"blocks.{int(index) + 1}.reducer").get_parameter(key).copy_(
                    torch.from_numpy(value)
                )
    return model, reduction


def test_cropr_with_last_layer_fusion_matches_reference() -> None:
    ref = golden.load("cropr/cropr_cls_llf")
    model, reduction = cropr_model(ref)
    torch.testing.assert_close(run(model, golden.images(ref)), golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    assert [state.num_tokens for state in reduction.states[2:6]] == ref["tokens_after_module"].tolist()
    assert not reduction.state.pruned  # everything came back
    assert reduction.state.aux == ()  # no auxiliary heads outside training


def test_cropr_trains_with_isolated_gradients() -> None:
    ref = golden.load("cropr/cropr_cls_llf")
    model, reduction = cropr_model(ref)
    model.train()
    logits = model(golden.images(ref))
    aux = reduction.aux("logits")
    targets = torch.tensor(ref["config"]["targets"])
    losses = [nn.functional.cross_entropy(out, targets) for out in (logits, *aux)]
    torch.testing.assert_close(torch.stack(losses), golden.tensor(ref, "train/losses"), atol=1e-9, rtol=0)
    sum(losses).backward()
    grads = {"cls_token": model.cls_token, "head.weight": model.head.weight}
    grads |= {f"cropr.{i}.cross_attn.queries": model.blocks[i + 1].reducer.queries for i in range(4)}
    for name, parameter in grads.items():
        expected = golden.tensor(ref, f"train/grad/{name}")
        # stored as float32 although computed in float64
        atol = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected.double(), atol=atol, rtol=0)
