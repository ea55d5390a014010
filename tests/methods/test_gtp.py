"""GTP: reference vectors, the graph, propagation."""

from __future__ import annotations

import pytest
import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.assignment import prune
from vitrim.core.attention import Attention
from vitrim.core.tokens import TokenState
from vitrim.methods.gtp import GTP, normalised, patch_graph, semantic_neighbours, spatial_neighbours

NAMES = ["gtp_list_numprop", "gtp_mixed_p5_noscale", "gtp_mixed_p5_scale", "gtp_prune_only_p5", "gtp_semantic_p5_n4"]


def config(ref) -> GTP:
    args = ref["config"]["args"]
    return GTP(
        num_prop=args["num_prop"],
        propagation="graph" if args["propagation"] == "GraphProp" else "none",
        graph=args.get("graph_type", "Mixed").lower(),
        num_neighbours=args.get("num_neighbours", 8),
        alpha=args.get("alpha", 0.1),
        token_scale=args.get("token_scale", False),
        sparsity=args.get("sparsity", 1.0),
    )


@golden.cases([f"pruning/{name}" for name in NAMES])
def test_reference(ref: golden.Reference) -> None:
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config(ref), record=True)
    learned.check_outputs(ref, model, reduction)
    for block, published in learned.check_kept_sets(ref, reduction).items():
        state = reduction.states[block + 1]
        places = in_order(state, published)
        if f"token_scale_after/{block}" in ref:
            scale = state.carry["scale"]
            places_and_class = torch.cat([torch.zeros_like(places[:, :1]), places + 1], 1)
            ref.check(f"token_scale_after/{block}", scale.gather(1, places_and_class))
        if f"graph_after/{block}" in ref:
            ref.check(f"graph_after/{block}", square(graph_of(state), places))
    learned.check_float32(ref, model)


def graph_of(state: vitrim.TokenState) -> torch.Tensor:
    """(B, P, P) the graph of the patch tokens that ``state`` carries."""
    root = state.carry["root"][:, 1:]
    columns = state.carry["place"][:, None, 1:].expand(-1, root.shape[1], -1)  # of the tokens that are left
    return normalised(state.carry["joined"][:, 1:].gather(2, columns), root, root)


def in_order(state: vitrim.TokenState, patches: torch.Tensor) -> torch.Tensor:
    """(B, P) the place of each of the ``patches`` (B, P) among the patch tokens of ``state``."""
    own = state.position[:, 1:] - 1
    return (own[:, None] == patches[:, :, None]).int().argmax(2)


def square(graph: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows and columns of ``graph`` (B, P, P) in ``order`` (B, P)."""
    index = torch.arange(graph.shape[0])[:, None, None]
    return graph[index, order[:, :, None], order[:, None, :]]


def test_spatial_neighbours_of_corner_edge_and_middle() -> None:
    near = spatial_neighbours((3, 4), torch.device("cpu"))
    assert near[0].nonzero().flatten().tolist() == [1, 4, 5]
    assert near[5].nonzero().flatten().tolist() == [0, 1, 2, 4, 6, 8, 9, 10]
    assert near[3].nonzero().flatten().tolist() == [2, 6, 7]
    assert torch.equal(near, near.T)


def test_semantic_neighbours_are_the_most_similar_others() -> None:
    patches = torch.randn(2, 9, 5, dtype=torch.float64)
    found = semantic_neighbours(patches, 3)
    assert (found.sum(2) == 3).all()
    assert not found.diagonal(dim1=1, dim2=2).any()
    similarity = torch.nn.functional.cosine_similarity(patches[:, :, None], patches[:, None], dim=-1)
    worst = similarity.masked_fill(~found, 2).amin(2)
    others = similarity.masked_fill(found | torch.eye(9, dtype=torch.bool), -2).amax(2)
    assert (worst > others).all()
    assert (semantic_neighbours(patches[:, :1], 3) == 0).all()


def test_graph_is_normalised_by_row_degrees() -> None:
    patches = torch.randn(1, 12, 5, dtype=torch.float64)
    joined, root = patch_graph(patches, (3, 4), "mixed", 2)
    assert torch.equal(joined, spatial_neighbours((3, 4), torch.device("cpu")) | semantic_neighbours(patches, 2))
    inverse = torch.diag_embed(joined.double().sum(2).rsqrt())
    torch.testing.assert_close(normalised(joined, root, root), inverse @ joined.double() @ inverse)


@pytest.mark.parametrize("graph", ["spatial", "mixed", "semantic"])
@pytest.mark.parametrize("own", [(24, 32), (64, 64)])
def test_the_graph_is_that_of_the_grid_of_the_forward(graph: str, own: tuple[int, int]) -> None:
    model = tiny.vit(img_size=own, patch_size=8, dynamic_img_size=True)()
    reduction = vitrim.reduce_(model, GTP(num_prop=0, graph=graph))
    seen = []
    model.norm_pre.register_forward_hook(lambda module, args, out: seen.append(out))
    for grid in ((8, 8), (4, 16), (16, 4), (2, 7)):
        with torch.no_grad():
            model(torch.randn(2, 3, 8 * grid[0], 8 * grid[1]))
        joined, root = patch_graph(seen[-1][:, 1:], grid, graph, 8)
        torch.testing.assert_close(graph_of(reduction.state), normalised(joined, root, root))
        assert reduction.state.grid == (None if graph == "semantic" else grid)  # nobody asked for it


@pytest.mark.parametrize("selection", ["diagonal", "received", "class_token"])
def test_other_selections_keep_the_highest(selection: str) -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, GTP(num_prop=(6, 0, 0, 0), selection=selection), record=True)
    maps = []
    model.blocks[0].reducer.register_forward_hook(lambda module, args, out: maps.append(args[1].probabilities()))
    with torch.no_grad():
        model(tiny.images().double())
    score = {
        "diagonal": maps[0].diagonal(dim1=2, dim2=3).amax(1),
        "received": maps[0].sum(2).amax(1),
        "class_token": maps[0][:, :, 0].mean(1),
    }[selection]
    assert torch.equal(reduction.states[1].position[:, 1:], score[:, 1:].topk(30, dim=1).indices + 1)


def test_the_class_token_scores_by_the_sparse_map() -> None:
    """The map without its small entries feeds both attention and the choice."""
    model = tiny.HOSTS["vit"]().double()
    config = GTP(num_prop=(6, 0, 0, 0), selection="class_token", sparsity=0.5, last_block="full")
    reduction = vitrim.reduce_(model, config, record=True)
    seen = []
    model.blocks[0].reducer.register_forward_hook(lambda module, args, out: seen.append(args[1].logits()))
    with torch.no_grad():
        model(tiny.images().double())
    whole = seen[0].softmax(dim=-1)
    n = whole.shape[-1]
    least = whole.flatten(2).sort(dim=2).values[:, :, n * n // 2 - 1, None, None]
    score = whole.where(whole >= least, 0.0)[:, :, 0].mean(1)
    kept = score.gather(1, reduction.states[1].position[:, 1:])
    assert torch.equal(kept, kept.sort(dim=1, descending=True).values)
    assert not torch.equal(score, whole[:, :, 0].mean(1))
    assert torch.equal(kept, score[:, 1:].topk(kept.shape[1], dim=1).values)


def test_maps_that_a_model_hands_out_are_the_sparse_ones_it_attends_by() -> None:
    model = tiny.HOSTS["hf_vit_eager"]()
    vitrim.reduce_(model, GTP(num_prop=2, sparsity=0.5, last_block="full"))
    with torch.no_grad():
        maps = model(tiny.images(), output_attentions=True).attentions
    for found in maps:
        zeroed = (found == 0).flatten(2).sum(2)
        assert (zeroed == found.shape[-1] ** 2 // 2 - 1).all()  # the last of the smaller half is the least that stays


def test_scales_are_not_rounded_by_autocast() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, GTP(num_prop=8, last_block="full"), record=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tiny.images())
    gained = reduction.states[1].carry["scale"] - 1.0
    assert gained.dtype == torch.float32
    assert (gained > 0).any()
    assert not torch.equal(gained, gained.to(torch.bfloat16).float())


def test_tokens_gain_in_full_precision_under_autocast() -> None:
    config = GTP(num_prop=2, graph="spatial", alpha=1.0, token_scale=False)
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, config)
    reducer = model.blocks[0].reducer
    x = torch.randn(1, 10, 4)
    state = reducer.start(x, TokenState.start(x, num_prefix=1, grid=(3, 3)))
    kept = torch.tensor([[0, 2, 3, 4, 5, 6, 7]])  # of a grid of 3 x 3 the patches 1 and 8 go
    with torch.autocast("cpu", torch.bfloat16):
        gained, _ = reducer.carry_out(prune(state, kept), x, state)
    degree = [3, 5, 3, 5, 8, 5, 3, 5, 3]
    neighbours = {1: (0, 2, 3, 4, 5), 8: (4, 5, 7)}
    expected = x[0, 1:].double()
    for lost, places in neighbours.items():
        for place in places:
            expected[place] += x[0, 1 + lost].double() / (degree[place] * degree[lost]) ** 0.5
    expected = expected[kept[0]]
    torch.testing.assert_close(gained[0, 1:].double(), expected, atol=1e-6, rtol=0)
    assert (expected - x[0, 1:].double()[kept[0]]).abs().max() > 0.01


@pytest.mark.parametrize("sparsity", [1.0, 0.5])
def test_a_map_that_is_kept_for_attending_is_computed_once(sparsity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the map that decides also attends; elsewhere a kernel of its own does. Both give the same logits."""
    maps: list[Attention] = []
    computed = Attention.logits

    def counted(attention: Attention) -> torch.Tensor:
        maps.append(attention)
        return computed(attention)

    outputs = {}
    model = tiny.HOSTS["vit"]().double()
    vitrim.reduce_(model, GTP(num_prop=2, sparsity=sparsity, last_block="full"))
    for kept in (True, False):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(vitrim.methods.gtp, "map_is_faster", lambda attention, kept=kept: kept)
            patch.setattr(Attention, "logits", counted)
            outputs[kept] = model(tiny.images().double())
        assert len(maps) == len(model.blocks)
        maps.clear()
    torch.testing.assert_close(outputs[True], outputs[False], atol=1e-12, rtol=0)


@pytest.mark.slow  # eager maps are compared with the vectors
def test_a_sparse_map_is_the_same_in_a_graph() -> None:
    """Which has no k-th value: ONNX knows none."""
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, "gtp:num_prop=4,sparsity=0.5")
    images = tiny.images()
    with torch.no_grad():
        program = torch.export.export(model, (images,))
        torch.testing.assert_close(program.module()(images), model(images))
    assert "kthvalue" not in str(program.graph)
