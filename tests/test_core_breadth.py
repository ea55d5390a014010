"""The core carries methods far from ToMe: learned soft mixing, ragged selection, a bank, fused queries, a last fusion.

Each is written here in a few lines against the public interface and compared with its reference vectors, so that a change
of the core that would shut out a kind of method fails at once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import golden_models as golden
import pytest
import torch
from torch import Tensor, nn

import vitrim
from vitrim.block import Idle
from vitrim.matching import best_partners, most_similar
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


# ---- ATS: another number of tokens in every image, selected at the query -----------------------------------------------


class ATS(vitrim.MethodConfig):
    name = "test_ats"
    adaptive = True
    rate: float = 0.5
    blocks: tuple[int, ...] = (1, 3, 5)

    def build(self, layer: vitrim.Layer) -> vitrim.Reducer | None:
        return ATSReducer(self, layer, self.blocks.index(layer.depth) + 1) if layer.depth in self.blocks else None


class ATSReducer(vitrim.Reducer):
    site = "query"

    def __init__(self, config: ATS, layer: vitrim.Layer, stage: int) -> None:
        super().__init__(config, layer)
        self.count = int(config.rate**stage * layer.initial_patches) + 1

    def assign(self, x: Tensor, attention: vitrim.Attention, state: vitrim.TokenState) -> vitrim.Hard:
        p, k = state.num_prefix, self.count
        score = (attention.class_row() * attention.v.norm(dim=-1)).sum(1)[:, p:]
        real = torch.ones_like(score, dtype=torch.bool) if state.mask is None else state.mask[:, p:]
        score = score * real
        cdf = (score / (score.sum(1, keepdim=True) + 1e-6)).cumsum(1).masked_fill(~real, 9.0)
        points = (2 * torch.arange(1, k, dtype=cdf.dtype) - 1) / (2 * k)
        nearest = (points[None, :, None] - cdf[:, None, :]).abs().argmin(-1)
        chosen = torch.zeros_like(real).scatter_(1, nearest, True)
        keep = chosen.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, : k - 1]
        return vitrim.prune(state, keep, valid=chosen.gather(1, keep))


def test_ats_matches_reference_padded_to_its_bound() -> None:
    ref = golden.load("haurum/ats_p64_r50")
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, ATS(), record=True)
    torch.testing.assert_close(run(model, golden.images(ref)), golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    for block in (1, 3, 5):
        state = reduction.states[block + 1]
        kept = torch.where(state.mask, state.position, 0)[:, 1:].sort(1, descending=True).values - 1
        expected = golden.tensor(ref, f"kept_abs/{block}").long().sort(1, descending=True).values
        width = expected.shape[1]
        assert torch.equal(kept[:, :width], expected)
        assert (kept[:, width:] == -1).all()


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


# ---- MCTF: fuses at the query, projects values again, keeps its own order ------------------------------------------------


class MCTF(vitrim.MethodConfig):
    name = "test_mctf"
    kind = "merge"
    proportional: bool = True
    r: int = 8

    def schedule(self, num_layers: int) -> list[Amount | None]:
        return [None] + [Remove(self.r)] * (num_layers - 1)

    def build(self, layer: vitrim.Layer) -> vitrim.Reducer | None:
        return MCTFReducer(self, layer) if layer.depth else None


class MCTFReducer(vitrim.Reducer):
    site = "query"
    fresh_values: ClassVar[bool] = True

    def assign(self, x: Tensor, attention: vitrim.Attention, state: vitrim.TokenState) -> vitrim.Hard:
        r = self.amount.count
        importance = attention.column_mean()
        info, size = 1 / importance, 1 / state.size
        info, size = info / info.amax(1, keepdim=True), size / size.amax(1, keepdim=True)
        unit = nn.functional.normalize(x, dim=-1)
        similarity = (unit @ unit.transpose(-1, -2) + 1) / 2
        total = (
            similarity * (info[:, :, None] * info[:, None]) ** (1 / 20) * (size[:, :, None] * size[:, None]) ** (1 / 40)
        )
        total = total[:, ::2, 1::2].clone()  # even places, class token first, against odd ones
        total[:, 0] = -torch.inf
        first, second = r // 2, r - r // 2
        best, partner = total.max(-1)
        moved, kept = most_similar(best, first)
        kept_rows = total.gather(1, kept[:, :, None].expand(-1, -1, total.shape[2]))
        back, into_kept = kept_rows.max(1)
        order = back.argsort(1, descending=True)
        moved_odd, kept_odd = order[:, :second], order[:, second:]
        # where each odd token ends: its own place behind the kept even ones, or one of those
        place = torch.empty_like(order).scatter_(
            1, kept_odd, torch.arange(kept_odd.shape[1]).expand_as(kept_odd) + kept.shape[1]
        )
        place = place.scatter(1, moved_odd, into_kept.gather(1, moved_odd))
        into = torch.cat([place.gather(1, partner.gather(1, moved)), place.gather(1, moved_odd)], 1)
        patches = torch.cat([2 * kept[:, 1:] - 1, 2 * kept_odd], 1)
        joining = torch.cat([2 * moved - 1, 2 * moved_odd], 1)
        return vitrim.merge(state, patches, joining, into - 1, weight=importance * state.size)


@pytest.mark.parametrize(("name", "r"), [("merging/mctf_r8", 8), ("merging/mctf_r2", 2)])
def test_mctf_matches_reference(name: str, r: int) -> None:
    ref = golden.load(name)
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, MCTF(r=r), record=True)
    torch.testing.assert_close(run(model, golden.images(ref)), golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    assert torch.equal(reduction.state.source, golden.tensor(ref, "source").long())


def test_mctf_with_the_last_block_on_the_class_token_only_is_the_same() -> None:
    ref = golden.load("merging/mctf_r8")
    model = golden.vit(ref)
    vitrim.reduce_(model, MCTF(last_block="class_token"))
    torch.testing.assert_close(run(model, golden.images(ref)), golden.tensor(ref, "logits"), atol=1e-9, rtol=0)


def test_best_partners_is_what_mctf_needs_not_keys() -> None:
    """Matching is a function of any vectors: the residual stream as well as keys."""
    x = torch.randn(2, 6, 4)
    best, index = best_partners(x[:, :3], x[:, 3:])
    assert best.shape == index.shape == (2, 3)
