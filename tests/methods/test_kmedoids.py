"""K-Medoids against its reference vectors, and the cost that a user would expect."""

from __future__ import annotations

import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.methods.kmedoids import WEIGHT, farthest_first, k_medoids, published_start

HALF = {"keep_rate": 0.5, "blocks": (1, 3, 5), "cost": "all"}
CASES = [
    ("haurum/kmedoids_p64_r50", vitrim.KMedoids(**HALF)),
    ("haurum/kmedoids_p64_r50_iters1", vitrim.KMedoids(**HALF, iterations=1)),
    ("haurum/kmedoids_p196_r70", vitrim.KMedoids(cost="all")),
]


@golden.cases(CASES, "config")
def test_reference(ref: golden.Reference, config: vitrim.KMedoids) -> None:
    model, reduction = learned.reduced(ref, config, {})
    heads = ref["config"]["model"]["num_heads"]
    weights = learned.caught(model, ref["config"]["args"]["blocks"], lambda m, x, attention, state: state.carry[WEIGHT])
    learned.check_outputs(ref, model, reduction)
    learned.check_kept(ref, reduction)
    learned.check_assignments(ref, reduction)
    for block, weight in weights.items():
        ref.check(f"token_weights/{block}", weight[:, 1:] * heads * weight.shape[1])  # a sum over heads and queries
    learned.check_float32(ref, model)


def test_default_cost_finds_the_weighted_medoid_of_each_cluster() -> None:
    torch.manual_seed(0)
    points, weight = torch.randn(2, 30, 4).double(), torch.rand(2, 30).double()
    distance = torch.cdist(points, points)
    start = weight.topk(6).indices
    medoids, _ = k_medoids(distance, weight, start, 1)
    _, cluster = k_medoids(distance, weight, start, 0)
    for image in range(2):
        for k in range(6):
            members = (cluster[image] == k).nonzero().squeeze(1)
            cost = (distance[image][members][:, members] * weight[image, members]).sum(1)
            assert medoids[image, k] == members[cost.argmin()]


def test_each_round_lowers_the_cost() -> None:
    torch.manual_seed(0)
    points = torch.randn(1, 40, 3).double()
    distance, weight = torch.cdist(points, points), torch.ones(1, 40).double()
    costs = []
    for rounds in range(5):
        medoids, cluster = k_medoids(distance, weight, torch.arange(5)[None], rounds)
        costs.append(distance.gather(2, medoids.gather(1, cluster)[:, :, None]).sum().item())
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_duplicates_never_empty_a_cluster() -> None:
    points = torch.zeros(1, 8, 2)
    distance = torch.cdist(points, points)
    for over_all in (False, True):
        medoids, _ = k_medoids(distance, torch.ones(1, 8), torch.tensor([[1, 5, 7]]), 3, over_all)
        assert len(set(medoids[0].tolist())) == 3
    assert len(set(farthest_first(distance, 8)[0].tolist())) == 8
    assert len(set(published_start(distance, 8)[0].tolist())) == 8


def test_tokens_are_the_medoids_themselves_and_sizes_count_their_clusters() -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.KMedoids(keep_rate=0.25, blocks=(2,)), record=True)
    tokens = []
    model.blocks[1].register_forward_hook(lambda m, i, out: tokens.append(out))
    project = model.blocks[2].project
    model.blocks[2].project = lambda x, *args: tokens.append(x) or project(x, *args)
    with torch.no_grad():
        model(tiny.images().double())
    del model.blocks[2].project
    state = reduction.states[3]
    before, after = tokens
    assert torch.equal(after, before.gather(1, state.position[:, :, None].expand_as(after)))
    assert (state.size.sum(1) == 37).all()
    assert state.carry == {}


def test_equal_weight_needs_no_attention_map_and_may_start_at_block_0() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.KMedoids(keep_rate=0.5, blocks=(0, 2), equal_weight=True), record=True)
    with torch.no_grad():
        model(tiny.images())
    assert reduction.tokens_per_block == [19, 19, 10, 10]
    assert all(state.carry == {} for state in reduction.states)


def test_first_medoids_of_equal_weight_by_plain_lines() -> None:
    torch.manual_seed(4)
    points = torch.randn(3, 20, 2).double()
    distance = torch.cdist(points, points)
    central, random = farthest_first(distance, 6), published_start(distance, 6)
    assert len(set(random[:, 0].tolist())) == 1  # one index for the whole batch
    assert len({int(published_start(distance, 1)[0, 0]) for _ in range(40)}) > 5
    for image in range(3):
        for found, first, joined in ((central, distance[image].sum(1).argmin(), min), (random, random[image, 0], max)):
            chosen = [int(first)]
            while len(chosen) < 6:
                others = [patch for patch in range(20) if patch not in chosen]
                far = [joined(float(distance[image, patch, one]) for one in chosen) for patch in others]
                chosen.append(others[far.index(max(far))])
            assert found[image].tolist() == chosen


def test_published_start_in_a_model() -> None:
    model, images = tiny.HOSTS["vit"](), tiny.images()
    config = vitrim.KMedoids(keep_rate=0.5, blocks=(0, 2), equal_weight=True, start="random", cost="all")
    reduction = vitrim.reduce_(model, config, record=True)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            runs.append(model(images))
        assert reduction.tokens_per_block == [19, 19, 10, 10]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@torch.no_grad()
def test_equal_weights_need_no_map_and_so_serve_blocks_across_windows() -> None:
    model = tiny.FURTHER["hf_sam"]().eval()
    dense = model(tiny.images())[0]
    vitrim.reduce_(model, "kmedoids:equal_weight=true,keep_rate=1.0")
    torch.testing.assert_close(model(tiny.images())[0], dense, atol=1e-5, rtol=1e-5)
    vitrim.restore_(model)
    reduction = vitrim.reduce_(model, "kmedoids:equal_weight=true,keep_rate=0.5", record=True)
    assert model(tiny.images())[0].shape == dense.shape
    assert reduction.tokens_per_block[0] > reduction.tokens_per_block[-1]
