"""CLIP, MetaCLIP 2 and SigLIP with both towers: only the vision tower is reduced. And the pooling heads of SigLIP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPModel, MetaClip2Config, MetaClip2Model, SiglipConfig, SiglipModel

import tiny
import vitrim
from tiny_hosts.common import seeded
from tiny_hosts.transformers_clip import VISION
from vitrim.core.block import ReducedBlock
from vitrim.core.registry import find_host, host_of
from vitrim.core.tokens import take

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 20,
    "eos_token_id": 19,
    "max_position_embeddings": 8,
}
IDS = torch.tensor([[0, 4, 7, 19, 1, 1], [0, 5, 2, 6, 8, 19], [0, 3, 3, 19, 1, 1]])
MASK = (IDS != 1).long()

BOTH = {
    "clip": seeded(lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16))),
    "metaclip_2": seeded(
        lambda: MetaClip2Model(MetaClip2Config(text_config=TEXT, vision_config=VISION, projection_dim=16))
    ),
    "siglip": seeded(lambda: SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION))),
}
both = pytest.mark.parametrize("name", BOTH)


OF_TRANSFORMERS = {
    **BOTH,
    **{name: create for name, create in {**tiny.HOSTS, **tiny.FURTHER}.items() if name.startswith("hf_")},
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_what_owns_the_layers_is_a_host_by_itself(name: str) -> None:
    """A message says to reduce it, where a model of more than that is refused."""
    model = OF_TRANSFORMERS[name]()
    host = host_of(model)
    assert find_host(host.trunk(model)) is host.trunk_host(model)  # type: ignore[attr-defined]


def call(model: Any) -> Any:
    return model(input_ids=IDS, pixel_values=tiny.images(), attention_mask=MASK)


@both
def test_the_text_tower_stays_as_it_is(name: str) -> None:
    model = BOTH[name]()
    with torch.no_grad():
        dense = call(model)
        reduction = vitrim.reduce_(model, "tome:r=4")
        reduced = call(model)
        image = model.get_image_features(tiny.images()).pooler_output
        assert torch.equal(model.get_text_features(IDS, attention_mask=MASK).pooler_output, dense.text_model_output[1])
    assert not any(isinstance(module, ReducedBlock) for module in model.text_model.modules())
    assert all(isinstance(block, ReducedBlock) for block in model.vision_model.encoder.layers)
    assert torch.equal(reduced.text_embeds, dense.text_embeds)
    assert reduced.logits_per_image.shape == (2, 3)
    assert not torch.equal(reduced.logits_per_image, dense.logits_per_image)
    torch.testing.assert_close(image / image.norm(dim=-1, keepdim=True), reduced.image_embeds)
    assert reduction.state.num_patches == 20
    vitrim.restore_(model)
    with torch.no_grad():
        assert torch.equal(call(model).logits_per_image, dense.logits_per_image)


@both
def test_pooled_embeddings_weigh_tokens_by_their_size(name: str) -> None:
    """The heads against what they are on few tokens: a probe that adds log(size), and the class token itself."""
    model = BOTH[name]().double()
    reduction = vitrim.reduce_(model, "tome:r=4")
    with torch.no_grad():
        out = model.vision_model(tiny.images().double())
    state, tokens = reduction.state, out.last_hidden_state
    if name != "siglip":  # the pooled token is read: nothing is un-merged
        assert tokens.shape[1] == state.num_tokens
        return
    assert tokens.shape[1] == 36
    few, head = take(tokens, state.position), model.vision_model.head
    with torch.no_grad():
        pooled = head.attention(
            head.probe.expand(2, -1, -1),
            few,
            few,
            attn_mask=state.size.log()[:, None, :].repeat_interleave(head.attention.num_heads, 0),
        )[0]
        pooled = (pooled + head.mlp(head.layernorm(pooled)))[:, 0]
    torch.testing.assert_close(out.pooler_output, pooled, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("host", ["hf_siglip", "hf_clip_classifier", "hf_dinov2", "hf_beit_mean"])
def test_mean_heads_weigh_tokens_by_their_size(host: str) -> None:
    model = tiny.HOSTS[host]().double()
    reduction = vitrim.reduce_(model, "tome:r=4")
    seen = []
    model.classifier.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        grid = model(tiny.images().double(), output_hidden_states=True).hidden_states[-1]
        if host.startswith("hf_dinov2"):
            grid = model.dinov2.layernorm(grid)
        if host == "hf_siglip":
            grid = model.vision_model.post_layernorm(grid)
        state, prefix = reduction.state, tiny.num_prefix(model)
        few = take(grid, state.position)[:, prefix:]
        size = state.size[:, prefix:, None]
        mean = (few * size).sum(1) / size.sum(1)
        if host == "hf_beit_mean":
            mean = model.beit.pooler.layernorm(mean)
        if host.startswith("hf_dinov2"):
            mean = torch.cat([grid[:, 0], mean], 1)
        model(tiny.images().double())
    torch.testing.assert_close(seen[-1], mean, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(F.linear(mean, model.classifier.weight, model.classifier.bias), model.classifier(mean))
