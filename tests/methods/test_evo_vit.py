"""Evo-ViT: reference vectors of both modes, the bank, the slow-fast update, the training loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.scoring import patch_score
from vitrim.methods.evo_vit import IMPORTANCE
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.evo_vit import objective

NAMES = ["pruning/evovit_stage_r0.5", "pruning/evovit_layerwise_r0.5"]


def published(ref: dict[str, Any]) -> tuple[nn.Module, vitrim.Reduction]:
    """The reference's model: pooled head, query, key and value weights from the names of its release."""
    shape, args = ref["config"]["model"], ref["config"]["args"]
    model = VisionTransformer(
        **golden.geometry(ref, "patch_size"),
        global_pool="avg",
        norm_layer=partial(nn.LayerNorm, eps=shape["norm_eps"]),
    )
    given = golden.published(ref)
    last = shape["depth"] - 1
    state = {f"blocks.{last}.reducer.{kind}": given.pop(f"{kind.replace('.', '_cls.')}") for kind in HEAD}
    for i in range(shape["depth"]):
        for kind in ("weight", "bias"):
            parts = [given.pop(f"qks.{i}.qk.{kind}"), given.pop(f"vs.{i}.v.{kind}")]
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
            state[f"blocks.{i}.attn.proj.{kind}"] = given.pop(f"projs.{i}.{kind}")
            state[f"blocks.{i}.norm1.{kind}"] = given.pop(f"norms.{i}.{kind}")
    state.update({f"fc_{name}" if name.startswith("norm.") else name: value for name, value in given.items()})
    blocks = tuple(args["stages"]) if args["stage_wise"] else tuple(range(args["stages"][0], shape["depth"]))
    config = vitrim.EvoViT(keep_rate=args["prune_ratio"], blocks=blocks, class_head=True)
    reduction = vitrim.reduce_(model, config, record=True)
    model.load_state_dict(state, strict=True)
    return model.double().eval(), reduction


HEAD = ("norm.weight", "norm.bias", "head.weight", "head.bias")


@golden.cases(NAMES, arrays=("logits", "logits_f32", "pooled_features", "tokens_*", "order/*", "cls_attention_sum/*"))
def test_reference(ref: golden.Reference) -> None:
    model, reduction = published(ref)
    seen = attention_seen(model)
    pooled = []
    hook = model.fc_norm.register_forward_hook(lambda module, args, out: pooled.append(out))
    with torch.no_grad():
        ref.check("logits", model(golden.images(ref)))
    hook.remove()
    ref.check("pooled_features", pooled[0])
    # ours counts what leaves a block, before anything comes back
    assert reduction.tokens_per_block[-1] == 65
    ref.check("tokens_processed_per_block", reduction.tokens_per_block[:-1], lambda stored: stored[:-1].tolist())
    before_the_last = reduction.states[11].num_tokens
    ref.check("tokens_processed_per_block", before_the_last, lambda stored: stored[-1].item())
    assert reduction.config.counts(64, 12) == [count - 1 for count in reduction.tokens_per_block]
    for depth, key in learned.keys(ref, "cls_attention_sum").items():
        ref.check(key, seen[depth])
    check_importance(reduction, seen)
    check_rankings(ref, reduction)
    learned.check_float32(ref, model)


@golden.cases(NAMES, arrays=("train_*", "cls_feature"))
def test_training_has_two_heads(ref: golden.Reference) -> None:
    model, reduction = published(ref)
    class_tokens = []
    model.blocks[-1].reducer.norm.register_forward_hook(lambda module, args, out: class_tokens.append(args[0]))
    logits = model.train()(golden.images(ref))
    class_logits = reduction.aux("class_logits")[0]
    ref.check("train_logits_mean", logits)
    ref.check("train_logits_cls", class_logits)
    ref.check("cls_feature", class_tokens[0])
    targets = torch.tensor([1, 2, 3])
    losses = objective(reduction, logits, targets)
    expected = (nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(class_logits, targets)) / 2
    torch.testing.assert_close(losses["total"], expected)
    losses["total"].backward()
    used = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert used == {name for name, _ in model.named_parameters()}
    step = Step(model, reduction, golden.images(ref), targets, nn.functional.cross_entropy)
    again = losses_of(step)
    assert set(again) == set(losses)
    for term, value in again.items():
        torch.testing.assert_close(value, losses[term])


def test_without_the_second_head_a_step_learns_the_task_alone() -> None:
    model = tiny.HOSTS["avg_fc_norm"]().train()
    reduction = vitrim.reduce_(model, vitrim.EvoViT())
    targets = torch.tensor([1, 2])
    losses = losses_of(Step(model, reduction, tiny.images(), targets, nn.functional.cross_entropy))
    assert set(losses) == {"total"}
    torch.testing.assert_close(losses["total"], nn.functional.cross_entropy(model(tiny.images()), targets))


def check_rankings(ref: golden.Reference, reduction: vitrim.Reduction) -> None:
    """``order/<rank>``: the patches in order after each ranking; of those that wait only the set has a meaning."""
    for rank, block in enumerate(reduction.config.stages(12)):
        state = reduction.states[block + 1]  # after the last block everything is back, in the order of the ranking
        working = state.position[:, 1:33] - 1
        ref.check(f"order/{rank}", working, lambda stored: stored[:, :32])
        waiting = (state.position[:, 33:] if block == 11 else state.bank[0].indices.position) - 1
        ref.check(
            f"order/{rank}", [set(row) for row in waiting.tolist()], lambda stored: learned.as_sets(stored[:, 32:])
        )
    assert torch.equal(reduction.state.source.sort(1).values, torch.arange(65).expand(3, -1))


def attention_seen(model: nn.Module) -> dict[int, torch.Tensor]:
    """(B, P) attention of the class token in each block, summed over the heads, filled by a forward."""
    seen: dict[int, torch.Tensor] = {}
    for depth, block in enumerate(model.blocks):
        own = block.reducer.reduce

        def spy(site, x, attention, state, depth=depth, own=own):
            if site == "between":
                seen[depth] = 3 * patch_score(attention, state, "class_token")  # three heads
            return own(site, x, attention, state)

        block.reducer.reduce = spy
    return seen


def check_importance(reduction: vitrim.Reduction, seen: dict[int, torch.Tensor]) -> None:
    """Before the first stage only the latest attention counts; the importance of the first to wait stays as it was."""
    state = reduction.states[5]
    importance = torch.cat([state.carry[IMPORTANCE], state.bank[0].carry[IMPORTANCE]], 1)
    torch.testing.assert_close(3 * importance[:, 33:], seen[3].gather(1, state.bank[0].indices.position - 1))
    expected = 0.5 * seen[3].gather(1, state.position[:, 1:] - 1) + 0.5 * seen[4]
    torch.testing.assert_close(3 * importance[:, 1:33], expected)


@pytest.mark.parametrize("tradeoff", [0.25, 0.8, 1.0])
def test_the_tradeoff_weighs_the_attention_of_the_block_itself(tradeoff: float) -> None:
    """g <- (1 - t) g + t a in every block from the first stage on: the vectors' t = 0.5 cannot tell the two apart."""
    model = tiny.vit(depth=6, global_pool="avg", fc_norm=True)().double()
    reduction = vitrim.reduce_(model, vitrim.EvoViT(blocks=(2, 5), tradeoff=tradeoff), record=True)
    rows: dict[int, torch.Tensor] = {}
    for depth, block in enumerate(model.blocks):
        own = block.reducer.reduce

        def spy(site, x, attention, state, depth=depth, own=own):
            if site == "between":
                rows[depth] = attention.probabilities()[:, :, 0, 1:].mean(1)
            return own(site, x, attention, state)

        block.reducer.reduce = spy
    with torch.no_grad():
        model(tiny.images().double())
    working = reduction.states[5].position[:, 1:] - 1
    importance = rows[1].gather(1, working)
    for depth in (2, 3, 4):
        importance = (1 - tradeoff) * importance + tradeoff * rows[depth]
    torch.testing.assert_close(reduction.states[5].carry[IMPORTANCE][:, 1:], importance)


def test_patches_that_wait_do_not_change() -> None:
    model = tiny.HOSTS["avg_fc_norm"]().double()
    reduction = vitrim.reduce_(model, vitrim.EvoViT(blocks=(2,)), record=True)
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: outputs.append(out))
    with torch.no_grad():
        model(tiny.images().double())
    bank = reduction.states[3].bank[0]
    waiting = bank.indices.position[..., None].expand(-1, -1, 32)
    assert torch.equal(bank.tokens, outputs[1].gather(1, waiting))
    assert torch.equal(outputs[3].gather(1, waiting), outputs[1].gather(1, waiting))  # the last block un-merges


def test_fast_update_moves_those_that_wait_like_their_mean() -> None:
    model = tiny.HOSTS["avg_fc_norm"]().double()
    reduction = vitrim.reduce_(model, vitrim.EvoViT(blocks=(2,), fast_update=True), record=True)
    own, through = model.blocks[3].reducer.bring_back, []
    model.blocks[3].reducer.bring_back = lambda x, state: through.append(x[:, -1]) or own(x, state)
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: outputs.append(out))
    with torch.no_grad():
        model(tiny.images().double())
    assert reduction.tokens_per_block == [37, 37, 1 + 18 + 1, 37]
    before, during, final = outputs[1], reduction.states[3], outputs[3]
    position = during.bank[0].indices.position
    index = position[..., None].expand(-1, -1, 32)
    weight = reduction.states[2].carry[IMPORTANCE].gather(1, position)
    mean = (before.gather(1, index) * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
    step = final.gather(1, index) - before.gather(1, index)
    torch.testing.assert_close(step, (through[0] - mean)[:, None].expand_as(step))  # what the blocks added to the mean
    assert step.abs().max() > 1e-3
    torch.testing.assert_close(during.bank[0].tokens + mean[:, None], before.gather(1, index))
    assert not reduction.state.pruned
    assert (reduction.state.size == 1).all()
    # while they wait, the mean stands for them
    assert torch.equal(during.source.gather(1, position), torch.full_like(position, 19))


def test_without_rejoin_they_are_missing_in_the_mean() -> None:
    model = tiny.HOSTS["avg_fc_norm"]()
    config = vitrim.EvoViT(rejoin=False)
    reduction = vitrim.reduce_(model, config)
    pooled = []
    model.fc_norm.register_forward_hook(lambda module, args, out: pooled.append(args[0]))
    outputs = []
    model.norm.register_forward_hook(lambda module, args, out: outputs.append(args[0]))
    with torch.no_grad():
        model(tiny.images())
    assert config.counts(36, 4)[-1] == reduction.state.num_patches == 18
    torch.testing.assert_close(pooled[0], outputs[0][:, 1:].mean(1))


def test_layer_wise_and_stage_wise_can_take_turns() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.EvoViT(blocks=(1, 2, 3)), record=True)
    images = tiny.images()
    with torch.no_grad():
        layer_wise = model(images)
        reduction.set(blocks=(1, 3), keep_rate=0.25)
        stage_wise = model(images)
    assert reduction.tokens_per_block == [37, 10, 10, 37]
    assert not torch.equal(layer_wise, stage_wise)
    assert vitrim.EvoViT(rule="ceil_current", keep_rate=0.7).counts(10, 6) == [10, 10, 7, 7, 7, 10]
