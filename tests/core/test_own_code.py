"""Users' own code around a model: replaced forwards of classes, forwards put on blocks later, prompts among the tokens.

The oracle is the dense model with the same code; where a reduced one cannot follow it, the refusal in one line.
"""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import open_clip.transformer
import pytest
import timm.layers.attention
import timm.models.vision_transformer
import torch
import transformers.models.vit.modeling_vit as hf_vit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiny
import vitrim
from vitrim.core.block import ForwardWatch, foreign
from vitrim.core.registry import host_of

HOSTS = {**tiny.HOSTS, **tiny.FURTHER}
REFUSED = vitrim.UnsupportedModelError


def output(model: Any, images: Tensor | None = None, **more: Any) -> Tensor:
    with torch.no_grad():
        return tiny.logits(model(tiny.images() if images is None else images, **more))


# ---- replaced forwards of classes ------------------------------------------------------------------------------------

CLASSES = {
    "vit": (timm.layers.attention.Attention, timm.models.vision_transformer.Block),
    "hf_vit": (hf_vit.ViTAttention, hf_vit.ViTLayer, hf_vit.ViTModel),
    "open_clip": (nn.MultiheadAttention, open_clip.transformer.ResidualAttentionBlock),
    "open_clip_custom": (open_clip.transformer.Attention,),
}
PAIRS = [pytest.param(host, kind, id=f"{host}-{kind.__name__}") for host, kinds in CLASSES.items() for kind in kinds]


def doubled(kind: Any) -> Callable[..., Any]:
    own = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        return 2 * found if isinstance(found, Tensor) else (2 * found[0], *found[1:])

    return forward


@pytest.mark.parametrize(("host", "kind"), PAIRS)
def test_a_replaced_forward_of_a_class_is_refused(host: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HOSTS[host]()
    before = output(model)
    vitrim.reduce_(model, "tome:r=4")
    reduced = output(model)
    vitrim.restore_(model)
    with monkeypatch.context() as within:
        within.setattr(kind, "forward", doubled(kind))
        with pytest.raises(REFUSED, match=r"replaced by test_own_code|overrides the forward"):
            vitrim.reduce_(model, "tome:r=4")
        assert vitrim.get_reduction(model) is None
    assert torch.equal(output(model), before)
    vitrim.reduce_(model, "tome:r=4")
    assert torch.equal(output(model), reduced)


@pytest.mark.parametrize("host", ["vit", "hf_vit", "open_clip_custom"])
def test_one_that_is_replaced_later_is_refused_in_the_next_forward(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kind = HOSTS[host](), CLASSES[host][0]
    vitrim.reduce_(model, "tome:r=4")
    wanted = output(model)
    with monkeypatch.context() as within:
        within.setattr(kind, "forward", doubled(kind))
        with pytest.raises(REFUSED, match=f"^the forward of the class {kind.__name__} was replaced by test_own_code"):
            output(model)
    assert torch.equal(output(model), wanted)


@pytest.mark.parametrize("call", ["forward_features", "forward_head", "pool"])
def test_a_replaced_call_of_a_model_is_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = timm.models.vision_transformer.VisionTransformer
    own = getattr(kind, call)
    monkeypatch.setattr(kind, call, lambda self, *args, **kwargs: own(self, *args, **kwargs))
    with pytest.raises(REFUSED, match=f"^VisionTransformer overrides {call} of timm's VisionTransformer"):
        vitrim.reduce_(tiny.HOSTS["vit"](), "tome:r=4")


def test_decorators_leave_code_what_it_is() -> None:
    own = timm.layers.attention.Attention.forward
    assert foreign(torch.no_grad()(own), "timm") is None
    mine = doubled(timm.layers.attention.Attention)
    for other in (mine, torch.no_grad()(mine), types.MethodType(mine, object())):
        assert foreign(other, "timm") == f"{__name__}.doubled.<locals>.forward"
    assert foreign(len, "timm") is None
    assert foreign(pytest.raises, "timm") == "_pytest.raises.raises"


# ---- the factor of the logits ----------------------------------------------------------------------------------------

SCALED = ["vit", "parallel", "beit", "eva", "relpos", "samvit", "volo", "open_clip_custom", "windowed_vit"]
SCALED += ["dinov2_registers", "dinov3_storage", "hf_vit", "hf_siglip", "hf_sam", "hf_sam_eager", "hf_vitdet"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("host", SCALED)
def test_a_changed_scale_acts_as_in_the_library(host: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels of most libraries never read it."""
    if host == "open_clip_custom" and not fused:
        pytest.skip("the library's own attention does not run unfused")
    model = HOSTS[host]().double()
    images = tiny.given(host).double()
    for part in model.modules():
        for name in ("scale", "scaling"):
            if isinstance(vars(part).get(name), float):
                setattr(part, name, 2.0)
        for name in ("fused_attn", "use_fsdpa"):
            if name in vars(part):
                setattr(part, name, fused)
    wanted = output(model, images)
    vitrim.reduce_(model, "tome:r=0")
    for block in tiny.blocks(model):
        monkeypatch.setattr(type(block), "plain", False)  # else the library's own forward runs
    torch.testing.assert_close(output(model, images), wanted, atol=1e-6, rtol=1e-6)


# ---- forwards put on blocks after `reduce_` --------------------------------------------------------------------------


def dense_forward(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("depths", [(0, 1, 2, 3), (0,), (2,), (3,)], ids=str)
def test_a_forward_that_does_not_run_the_reduced_one_is_refused(depths: tuple[int, ...]) -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    wanted = output(model)
    for depth in depths:
        model.blocks[depth].forward = types.MethodType(dense_forward, model.blocks[depth])
    for call in (output, lambda model: model.forward_features(tiny.images())):
        for _ in range(2):
            with pytest.raises(REFUSED, match=f"^block {depths[0]} has a forward of its own, put on the"):
                call(model)
    with pytest.raises(REFUSED, match=f"^block {depths[0]} has a forward of its own"):
        output(copy.deepcopy(model))
    for depth in depths:
        del model.blocks[depth].forward
    assert torch.equal(output(model), wanted)
    assert reduction.tokens_per_block == [33, 29, 25, 21]
    vitrim.restore_(model)
    assert not any(isinstance(hook, ForwardWatch) for part in model.modules() for hook in part._forward_hooks.values())
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_one_that_runs_it_goes_on() -> None:
    """Gradient checkpointing by hand, accelerate, autocast: the oracle is the model without."""
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    wanted = tiny.run(model, tiny.images())
    wanted.square().sum().backward()
    gradient = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    for block in model.blocks:
        block.forward = lambda x, own=block.forward: checkpoint(own, x, use_reentrant=False)
    for _ in range(2):
        found = tiny.run(model, tiny.images())
        assert torch.equal(found, wanted)
        assert reduction.tokens_per_block == [33, 29, 25, 21]
        found.square().sum().backward()
    torch.testing.assert_close(model.blocks[0].attn.qkv.weight.grad, 2 * gradient)


def test_one_block_is_no_exception() -> None:
    model = tiny.vit(depth=1)()
    vitrim.reduce_(model, "tome:r=4")
    output(model)
    model.blocks[0].forward = types.MethodType(dense_forward, model.blocks[0])
    for _ in range(2):
        with pytest.raises(REFUSED, match=r"^block 0 has a forward of its own"):
            output(model)


def test_a_block_without_one_has_no_hooks_and_copies_as_it_is() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, "tome:r=4")
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(block._forward_hooks or block._forward_pre_hooks for block in other.blocks)
        other.blocks[0].own_note = "kept"
        assert other.blocks[0].own_note == "kept"
        assert torch.equal(output(other), output(model))


def test_a_handle_whose_blocks_were_all_replaced_says_so() -> None:
    """No reduced block runs then that could see it."""
    model = tiny.HOSTS["vit"]()
    dense = copy.deepcopy(model)
    reduction = vitrim.reduce_(model, "tome:r=4")
    assert reduction.tokens_per_block[0] == 33
    model.blocks = dense.blocks
    with pytest.raises(REFUSED, match=r"^block 0 of this VisionTransformer was changed after it was reduced"):
        _ = reduction.tokens_per_block


# ---- prompts among the tokens ----------------------------------------------------------------------------------------

PROMPTS = 5


class Prompted(timm.models.vision_transformer.VisionTransformer):
    """Visual prompt tuning as it is often written: prompts behind the class token, in front of the patches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prompts = nn.Parameter(torch.randn(1, PROMPTS, self.embed_dim))

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = super()._pos_embed(x)
        return torch.cat([x[:, :1], self.prompts.expand(len(x), -1, -1), x[:, 1:]], dim=1)


def put_prompts(part: nn.Module) -> None:
    """Behind the class token of what ``part`` returns."""
    prompts = torch.randn(1, PROMPTS, 32, generator=torch.Generator().manual_seed(0))

    def behind(module: nn.Module, args: Any, tokens: Tensor) -> Tensor:
        return torch.cat([tokens[:, :1], prompts.to(tokens).expand(len(tokens), -1, -1), tokens[:, 1:]], dim=1)

    part.register_forward_hook(behind)


def with_prompts(host: str) -> Any:
    if host == "timm, a subclass":
        torch.manual_seed(0)
        return Prompted(**tiny.GEOMETRY).eval()
    model = HOSTS[host]()
    part = {"vit": "pos_drop", "hf_vit": "embeddings", "hf_clip": "pre_layrnorm", "open_clip": "patch_dropout"}[host]
    if host == "open_clip":
        model.patch_dropout = nn.Identity()
    put_prompts(next(module for name, module in model.named_modules() if name.rpartition(".")[2] == part))
    return model


PROMPTED = ["timm, a subclass", "vit", "hf_vit", "hf_clip", "open_clip"]


@pytest.mark.parametrize("method", ["tome:r=4", "topk:keep_rate=0.5", "l2:keep_rate=0.5"])
@pytest.mark.parametrize("host", PROMPTED)
def test_prompts_that_nobody_announced_are_refused(host: str, method: str) -> None:
    model = with_prompts(host)
    before = output(model)
    vitrim.reduce_(model, method)
    with pytest.raises(REFUSED, match=rf"^{PROMPTS} tokens of this \w+ are neither patches nor known"):
        output(model)
    vitrim.restore_(model)
    assert torch.equal(output(model), before)


def announce(host: str, model: Any) -> None:
    """As the message says."""
    if host.startswith("hf"):
        host_of(model).trunk(model).config.num_register_tokens = PROMPTS
    else:
        model.num_prefix_tokens += PROMPTS


@pytest.mark.parametrize("host", PROMPTED[:-1])
def test_prompts_that_are_announced_stay(host: str) -> None:
    model = with_prompts(host)
    wanted = output(model)
    announce(host, model)
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(output(model), wanted, atol=1e-5, rtol=1e-5)
    for method in ("tome:r=4", "topk:keep_rate=0.5"):
        reduction = vitrim.reduce_(model, method)
        output(model)
        assert reduction.state.num_patches < 36
        assert reduction.state.position[:, : 1 + PROMPTS].tolist() == [list(range(1 + PROMPTS))] * 2
        assert (reduction.state.size[:, : 1 + PROMPTS] == 1).all()


@pytest.mark.parametrize("host", ["hf_vit_mae", "hf_videomae", "hf_vjepa2", "hf_siglip", "hf_radio", "naflex"])
def test_hosts_that_show_their_patches_otherwise_count_them_too(host: str) -> None:
    model = HOSTS[host]()
    images = tiny.given(host)

    def one_more(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (torch.cat([args[0], args[0][:, -1:]], dim=1), *args[1:]), kwargs

    with vitrim.reduced(model, "tome:r=4,proportional=true"), torch.no_grad():
        model(images)
        handle = tiny.blocks(model)[0].register_forward_pre_hook(one_more, with_kwargs=True)
        with pytest.raises(REFUSED, match=r"^1 tokens of this \w+ are neither patches"):
            model(images)
        handle.remove()
        model(images)  # nothing is left of the forward that was refused


def test_embeddings_of_a_users_own_are_counted() -> None:
    """A module around the library's, in its place."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.prompts = nn.Parameter(torch.zeros(1, PROMPTS, 32))

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            x = self.inner(*args, **kwargs)
            return torch.cat([x[:, :1], self.prompts.expand(len(x), -1, -1), x[:, 1:]], dim=1)

    model = HOSTS["hf_clip"]()
    trunk: Any = host_of(model).trunk(model)
    trunk.embeddings = Around(trunk.embeddings)
    wanted = output(model)
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(REFUSED, match=f"^{PROMPTS} tokens"):
        output(model)
    vitrim.restore_(model)
    announce("hf_clip", model)
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(output(model), wanted, atol=1e-5, rtol=1e-5)


def test_fewer_tokens_than_patches_are_patch_dropout() -> None:
    model = tiny.vit(patch_drop_rate=0.5)().train()
    reduction = vitrim.reduce_(model, "tome:r=4")
    output(model)
    assert reduction.state.initial_patches == 18


def test_tokens_that_no_patch_embedding_made_are_not_counted() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tome:r=0,last_block=full")
    output(model)
    with torch.no_grad():
        model.blocks(torch.zeros(1, 50, 32))
    assert reduction.state.initial_patches == 49


@pytest.mark.slow
def test_prompts_are_seen_in_a_graph_too() -> None:
    torch.compiler.reset()
    model = with_prompts("vit")
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(Exception, match="are neither patches nor known"):
        output(torch.compile(model, fullgraph=True, backend="eager"))
    announce("vit", model)
    vitrim.restore_(model)
    vitrim.reduce_(model, "tome:r=4")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(output(compiled), output(model), atol=1e-5, rtol=1e-5)
