"""Users' own ViTs by names, and PyTorch's encoder: the oracle is the model; wrong descriptions are found and named."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiny
import vitrim
from vitrim.core import registry
from vitrim.core.attention import split_heads
from vitrim.core.plan import HostFacts, Layout
from vitrim.core.registry import ask, host_of
from vitrim.core.tokens import TokenState

DIM = 32


class ViT(nn.Module):
    """36 patches of 4 x 4 pixels behind a class token, and blocks of any kind."""

    def __init__(self, make: Callable[[], nn.Module], reads: str = "class token", extra: int = 0) -> None:
        super().__init__()
        self.sizes = SimpleNamespace(image=24)
        self.patches, self.reads = nn.Conv2d(3, DIM, 4, 4), reads
        self.prefix = 0 if reads == "no class token" else 1 + extra
        self.front = nn.Parameter(torch.randn(1, self.prefix, DIM))
        self.positions = nn.Parameter(torch.randn(1, 36 + self.prefix, DIM))
        self.stack = nn.ModuleDict({"h": nn.ModuleList(make() for _ in range(4))})
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 5))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.front.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = self.run_blocks(x)
        logits: Tensor = self.head(x[:, 0] if self.reads == "class token" else x.mean(dim=1))
        return logits

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.stack["h"]:  # type: ignore[union-attr]
            x = block(x)
        return x


class Encoder(ViT):
    """The same with PyTorch's encoder."""

    def __init__(self, reads: str = "class token", **options: Any) -> None:
        super().__init__(nn.Identity, reads)
        layer = nn.TransformerEncoderLayer(DIM, 2, 64, **options)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.first = options.get("batch_first", False)

    def run_blocks(self, x: Tensor) -> Tensor:
        found: Tensor = self.encoder(x) if self.first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return found


class Checkpointed(Encoder):
    """The same, whose layers run again in the backward pass."""

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.encoder.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.transpose(0, 1)


class SelfAttention(nn.Module):
    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.n_head, self.separate = 2, separate
        if separate:
            self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        else:
            self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj, self.resid_dropout = nn.Linear(DIM, DIM), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q(x), self.k(x), self.v(x)) if self.separate else self.c_attn(x).split(DIM, dim=2)
        q, k, v = (split_heads(part, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        update: Tensor = self.resid_dropout(self.c_proj(y))
        return update


class Block(nn.Module):
    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(DIM), SelfAttention(separate), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        update: Tensor = self.mlp(self.ln_2(x))
        return x + update


class Bare(nn.Module):
    """Without an attention module, without a norm in front, with a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), 4
        self.gamma, self.norm2, self.mlp = nn.Parameter(torch.randn(DIM)), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, 4) for part in self.qkv(x).chunk(3, dim=-1))
        x = x + self.gamma * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        update: Tensor = self.mlp(self.norm2(x))
        return x + update


class Multihead(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.attn = nn.MultiheadAttention(DIM, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        update: Tensor = self.mlp(self.norm2(x))
        return x + update


class PairAttention(nn.Module):
    """vit-pytorch's: the norm within, heads wider than the tokens' share, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = 2, nn.LayerNorm(DIM)
        self.to_qkv = nn.Linear(DIM, 3 * 2 * 24, bias=False)
        self.to_out = nn.Sequential(nn.Linear(2 * 24, DIM), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        update: Tensor = self.to_out(
            (q @ k.transpose(-2, -1) / 24**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2)
        )
        return update


class Pair(nn.ModuleList):
    """Attention and MLP in a list, as a block."""

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self
        x = x + attention(x)
        update: Tensor = mlp(x)
        return x + update


def pair() -> Pair:
    mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
    return Pair([PairAttention(), mlp])


class Deep(nn.Module):
    """A block whose attention lies two parts deep."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.ModuleDict({"norm": nn.LayerNorm(DIM), "core": SelfAttention(separate=False)})
        self.feed = nn.ModuleDict({"norm": nn.LayerNorm(DIM), "mlp": nn.Linear(DIM, DIM)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch["core"](self.branch["norm"](x))
        update: Tensor = self.feed["mlp"](self.feed["norm"](x))
        return x + update


class ReducedPair(vitrim.OwnBlock, Pair):
    host_class = Pair
    norm_name, attention_name, mlp_names = "0.norm", "0", ("1",)
    qkv_names, heads_name, output_names = ("to_qkv",), "heads", ("to_out",)


class ReducedDeep(vitrim.OwnBlock, Deep):
    host_class = Deep
    norm_name, attention_name, mlp_names = "branch.norm", "branch", ("feed.norm", "feed.mlp")
    qkv_names, heads_name = ("core.c_attn",), "core.n_head"
    output_names = ("core.c_proj", "core.resid_dropout")


class ReducedBlock(vitrim.OwnBlock, Block):
    host_class = Block
    norm_name, mlp_names = "ln_1", ("ln_2", "mlp")
    qkv_names, heads_name, output_names = ("c_attn",), "n_head", ("c_proj", "resid_dropout")


class ReducedSeparate(ReducedBlock):
    qkv_names = ("q", "k", "v")


class ReducedBare(vitrim.OwnBlock, Bare):
    host_class = Bare
    attention_name, norm_name, update_names = None, None, ("gamma",)


class ReducedMultihead(vitrim.OwnBlock, Multihead):
    host_class = Multihead


class ViTHost(vitrim.OwnHost):
    name, blocks_name, image_size, patch_size, patches_name = "own", "stack.h", "sizes.image", 4, "patches"
    reduced_blocks = (ReducedBlock,)


class EncoderHost(vitrim.OwnHost):
    name, blocks_name, image_size, patch_size, patches_name = "own", "encoder.layers", 24, (4, 4), "patches"


MODELS: dict[str, tuple[Callable[[], nn.Module], type[vitrim.OwnHost], dict[str, Any]]] = {
    "encoder": (Encoder, EncoderHost, {}),
    "encoder_first": (lambda: Encoder(batch_first=True), EncoderHost, {}),
    "encoder_norm_first": (lambda: Encoder(norm_first=True, activation="gelu", bias=False), EncoderHost, {}),
    "encoder_mean": (lambda: Encoder("no class token"), EncoderHost, {"heads": ("no class token",)}),
    "block": (lambda: ViT(Block), ViTHost, {}),
    "separate": (lambda: ViT(lambda: Block(separate=True)), ViTHost, {"reduced_blocks": (ReducedSeparate,)}),
    "registers": (lambda: ViT(Block, extra=2), ViTHost, {"num_prefix": "prefix"}),
    "mean": (lambda: ViT(Block, "patches"), ViTHost, {"heads": ("patches",)}),
    "bare": (lambda: ViT(Bare), ViTHost, {"reduced_blocks": (ReducedBare,)}),
    "pairs": (lambda: ViT(pair), ViTHost, {"reduced_blocks": (ReducedPair,)}),
    "dots": (lambda: ViT(Deep), ViTHost, {"reduced_blocks": (ReducedDeep,)}),
    "multihead": (lambda: ViT(Multihead), ViTHost, {"reduced_blocks": (ReducedMultihead,)}),
}


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._HOSTS, "entries", dict(registry._HOSTS.entries))


def made(name: str) -> nn.Module:
    """A model with its host registered, shaken, in double precision."""
    create, host, options = MODELS[name]
    torch.manual_seed(0)
    model = tiny.shaken(create().double().eval())
    vitrim.register_host(f"{__name__}.{type(model).__name__}")(type("Host", (host,), options) if options else host)
    return model


@pytest.mark.sampled(4)
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_reducing_nothing_is_the_model_and_the_last_block_has_two_forms(name: str) -> None:
    model, images = made(name), tiny.images().double()
    dense = model(images)
    logits = []
    for method in ("none", "tome:r=4", "tome:r=4,last_block=class_token"):
        if "class_token" in method and host_of(model).facts(model).head != "class token":
            continue
        reduction = vitrim.reduce_(model, method, record=True)
        logits.append(model(images))
        gone = 0 if method == "none" else 3 * 4 if "class_token" in method else 4 * 4
        assert reduction.states[-1].num_tokens == reduction.states[0].num_tokens - gone
        vitrim.restore_(model)
        assert torch.equal(model(images), dense)
    torch.testing.assert_close(logits[0], dense, atol=1e-9, rtol=1e-9)
    for again in logits[2:]:
        torch.testing.assert_close(again, logits[1], atol=1e-9, rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_merging_equal_patches_changes_nothing(name: str) -> None:
    """Against explicit duplicates: sizes count in attention, and in a mean over patches."""
    model: Any = made(name)
    model.positions.zero_()
    pairs = tiny.images().double().unflatten(-1, (-1, 8))
    pairs[..., 4:] = pairs[..., :4]
    images = pairs.flatten(-2)
    dense = model(images)
    reduction = vitrim.reduce_(model, "tome:r=[9,0,0,0]")
    torch.testing.assert_close(model(images), dense, atol=1e-9, rtol=1e-9)
    assert reduction.state.size.unique().tolist() == [1.0, 2.0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", tiny.REPRESENTATIVE)
@pytest.mark.parametrize("name", ["encoder", "encoder_norm_first", "block", "multihead"])
def test_methods_of_every_mechanism(name: str, config: str) -> None:
    model, images = made(name).train(), tiny.images().double()
    vitrim.reduce_(model, config)
    model(images).square().sum().backward()
    learned = {key for key, p in model.named_parameters() if ".reducer." not in key and p.grad is None}
    dense = made_again(name).train()
    dense(images).square().sum().backward()
    assert learned <= {key for key, p in dense.named_parameters() if p.grad is None}
    model.eval()
    twins = [copy.deepcopy(model)]
    if not MODELS[name][2]:  # a host that this file made for one test has no place to be found at
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert torch.equal(twin(images), model(images))
    vitrim.restore_(model)


def made_again(name: str) -> nn.Module:
    torch.manual_seed(0)
    return tiny.shaken(MODELS[name][0]().double())


def test_layers_that_run_again_in_the_backward_pass_know_their_tokens() -> None:
    """Also where the sequence comes first, so that tokens are handed on in another shape."""
    vitrim.register_host(f"{__name__}.Encoder")(EncoderHost)
    grads = []
    for kind in (Encoder, Checkpointed):
        torch.manual_seed(0)
        model = kind().double().eval()
        vitrim.reduce_(model, "tome:r=4")
        model(tiny.images().double()).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_the_facts_are_those_of_the_model() -> None:
    facts = ViTHost.facts(ViT(Block, extra=2))
    assert (facts.dim, facts.num_heads, facts.num_classes, facts.input_size) == (DIM, 2, 5, (3, 24, 24))
    assert (facts.grid_size, facts.num_prefix, facts.head_rows) == ((6, 6), 1, 1)
    assert ViTHost.patch_maker(ViT(Block)) is not None
    several = type("Host", (ViTHost,), {"num_prefix": "prefix"}).facts(ViT(Block, extra=2))
    assert (several.num_prefix, several.head_rows, several.has_class_token) == (3, 3, True)
    headless = type("Host", (ViTHost,), {"head_name": None, "heads": ("grid",)}).facts(ViT(Block))
    assert (headless.num_classes, headless.dense, headless.num_prefix, headless.head_rows) == (0, True, 0, None)


@torch.no_grad()
def test_such_a_model_is_scored_by_the_head_that_its_host_names() -> None:
    model: Any = made("block").float()
    batches = [(tiny.images(), torch.arange(len(tiny.images())) % 5)]
    dense, reduced = vitrim.evaluate(model, "tome:r=4", batches).rows
    right = (model(batches[0][0]).argmax(1) == batches[0][1]).double().mean().item()
    assert (dense["top1"], dense["cosine"]) == (right, pytest.approx(1.0))
    assert reduced["cosine"] < 0.9999
    assert ask(model).embedding(model, batches[0][0]).shape == (len(tiny.images()), DIM)


@torch.no_grad()
@pytest.mark.parametrize("name", ["block", "separate", "bare", "multihead"])
def test_values_alone_are_those_of_the_projection(name: str) -> None:
    """Also where the layer that projects must be called, since it is more than its weights."""
    for hooked in (False, True):
        model: Any = made(name) if not hooked else made_again(name).eval()
        first: Any = model.stack["h"][0]
        owner = first if name == "bare" else first.attn
        for layer in owner.children() if hooked and name != "multihead" else ():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda module, args, out: 1.5 * out)
        dense = model(tiny.images().double())
        vitrim.reduce_(model, "none")
        torch.testing.assert_close(model(tiny.images().double()), dense, atol=1e-9, rtol=1e-9)
        x = torch.randn(2, 37, DIM).double()
        found = first.project(x, TokenState.start(x, 1), None, None)
        torch.testing.assert_close(first.values(x), found.values, atol=1e-12, rtol=1e-12)
        few = first.project(x, TokenState.start(x, 1), 1, None)
        torch.testing.assert_close(few.q, found.q[:, :, :1], atol=1e-12, rtol=1e-12)


def override(**changes: Any) -> type[Any]:
    return type("Reduced", (ReducedBlock,), changes)


def without_sizes(self: Any, x: Tensor, state: Any, rows: int | None, given: Any) -> Any:
    return replace(ReducedBlock.project(self, x, state, rows, given), bias=None)


def without_rows(self: Any, x: Tensor, state: Any, rows: int | None, given: Any) -> Any:
    return ReducedBlock.project(self, x, state, None, given)


def with_another_scale(self: Any, x: Tensor, state: Any, rows: int | None, given: Any) -> Any:
    return replace(ReducedBlock.project(self, x, state, rows, given), scale=0.5)


COMPUTES = "a Block computes something else than what its reduced form was told; name its norms, attention and MLP"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "patch size": ({"patch_size": 8}, r"37 tokens enter its blocks, and 1 \+ 3 x 3 are 10; say heads, e.g."),
    "prefix": ({"num_prefix": 2}, r"37 tokens enter its blocks, and 2 \+ 6 x 6 are 38"),
    "no class token": ({"heads": ("no class token",)}, r"37 tokens enter its blocks, and 0 \+ 6 x 6 are 36"),
    "no such part": (
        {"blocks_name": "stack.layers"},
        "says blocks_name = 'stack.layers', and this ViT has no such part",
    ),
    "no norm": ({"reduced_blocks": (override(norm_name=None),)}, COMPUTES),
    "another norm": ({"reduced_blocks": (override(norm_name="ln_2"),)}, COMPUTES),
    "no projection": ({"reduced_blocks": (override(output_names=()),)}, COMPUTES),
    "half an MLP": ({"reduced_blocks": (override(mlp_names=("mlp",)),)}, COMPUTES),
    "scale": ({"reduced_blocks": (override(project=with_another_scale),)}, COMPUTES),
    "sizes": ({"reduced_blocks": (override(project=without_sizes),)}, "project leaves out the sizes of tokens"),
    "rows": ({"reduced_blocks": (override(project=without_rows),)}, "project leaves out rows; give the queries"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_description_is_refused_with_what_is_wrong(what: str) -> None:
    options, message = WRONG[what]
    torch.manual_seed(0)
    model = ViT(Block).train()
    vitrim.register_host(f"{__name__}.ViT")(type("Wrong", (ViTHost,), options))
    classes, modes = [type(part) for part in model.modules()], [part.training for part in model.modules()]
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        vitrim.reduce_(model, "tome:r=4")
    assert [type(part) for part in model.modules()] == classes
    assert [part.training for part in model.modules()] == modes
    assert not any(part._forward_hooks for part in model.modules())


class Wide(nn.Module):
    """32 x 64 pixels in overlapping patches, 4 x 8 of them, and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, 11, 8, 5)
        self.front, self.positions = nn.Parameter(torch.randn(1, 1, DIM)), nn.Parameter(torch.randn(1, 33, DIM))
        self.stack = nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(2))})
        self.head = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.front.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.stack["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits: Tensor = self.head(x[:, 0])
        return logits


class WideHost(ViTHost):
    name, image_size, patch_size = "wide", (32, 64), (8, 8)


def test_the_facts_of_a_wide_image_are_those_that_its_forward_shows() -> None:
    """Beside what a person reads in `Wide`: every field; and the grid that CubistMerge is told in a forward."""
    vitrim.register_host(f"{__name__}.Wide")(WideHost)
    model = Wide()
    facts = {"dim": DIM, "num_heads": 2, "num_classes": 10, "num_prefix": 1, "has_class_token": True, "head_rows": 1}
    assert WideHost.facts(model) == HostFacts(**facts, grid_size=(4, 8), input_size=(1, 32, 64))
    assert ask(model).layout(model) == Layout(DIM, 1, (8, 8))  # the stride, whatever the kernel
    planned = vitrim.reduce_(model, "cubist_merge:rows=1,columns=4").tokens_per_block
    recorded = vitrim.reduce_(model, "cubist_merge:rows=1,columns=4", record=True)
    with torch.no_grad():
        model(torch.randn(2, 1, 32, 64))
    assert planned == recorded.tokens_per_block == [33, 1 + 3 * 4]
    assert vitrim.reduce_(model, "evit:keep_rate=0.5,blocks=[0]").tokens_per_block == [18, 18]  # by its class token


class SecondReader(ViT):
    """A head that reads tokens 0 and 1."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.run_blocks(torch.cat([self.front.expand(len(x), -1, -1), x], dim=1) + self.positions)
        logits: Tensor = self.head(x[:, 0] + x[:, 1])
        return logits


@pytest.mark.parametrize("extra", [0, 2])
def test_a_head_that_reads_one_token_more_than_it_is_said_to(extra: int) -> None:
    """The first patch, or the first register, beside the class token."""
    kind = type("Host", (ViTHost,), {"num_prefix": "prefix"})
    vitrim.register_host(f"{__name__}.SecondReader")(kind)
    if extra:  # all tokens in front are said to be read
        vitrim.reduce_(SecondReader(Block, extra=extra), "tome:r=4")
        return
    with pytest.raises(vitrim.UnsupportedModelError, match="its head reads more than the first 1 tokens"):
        vitrim.reduce_(SecondReader(Block), "tome:r=4")


def test_a_head_that_reads_more_than_it_is_said_to() -> None:
    vitrim.register_host(f"{__name__}.ViT")(ViTHost)
    message = r'its head reads more than the first 1 tokens; say heads = \("patches",\)'
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        vitrim.reduce_(ViT(Block, "patches"), "tome:r=4")


@pytest.mark.parametrize("named", [False, True])
def test_blocks_that_get_more_than_tokens_need_a_host_of_their_own(named: bool) -> None:
    class Rotary(Block):
        def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
            return super().forward(x)

    class Model(ViT):
        def run_blocks(self, x: Tensor) -> Tensor:
            for block in self.stack["h"]:  # type: ignore[union-attr]
                x = block(x, table=x) if named else block(x, x)
            return x

    reduced = type("ReducedRotary", (ReducedBlock,), {"host_class": Rotary})
    host = type("Host", (ViTHost,), {"reduced_blocks": (reduced,)})
    with pytest.raises(vitrim.UnsupportedModelError, match="do not take tokens alone"):
        host.check(Model(Rotary))


def test_attention_with_the_sequence_first_is_refused_in_a_block_of_ones_own() -> None:
    host = type("Host", (ViTHost,), {"reduced_blocks": (ReducedMultihead,)})
    with pytest.raises(vitrim.UnsupportedModelError, match="own with batch_first=False"):
        host.check(ViT(lambda: Multihead(batch_first=False)))


def test_an_encoder_that_nobody_described() -> None:
    class Undescribed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1, enable_nested_tensor=False)

    with pytest.raises(
        vitrim.UnsupportedModelError, match=r"^model.encoder \(TransformerEncoder\) is refused: .* say so"
    ):
        vitrim.reduce_(Undescribed(), "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^model \(TransformerEncoder\) is refused: "):
        vitrim.reduce_(Undescribed().encoder, "tome:r=4")


def test_masks_are_refused_by_a_reduced_encoder() -> None:
    model: Any = made("encoder_first")
    vitrim.reduce_(model, "tome:r=4")
    tokens = torch.randn(2, 37, DIM).double()
    with pytest.raises(ValueError, match="takes no mask"):
        model.encoder(tokens, mask=torch.zeros(37, 37))
    with pytest.raises(ValueError, match="takes no mask"):
        model.encoder(tokens, src_key_padding_mask=torch.zeros(2, 37, dtype=torch.bool))


def test_a_model_on_meta_and_in_half_precision() -> None:
    vitrim.register_host(f"{__name__}.ViT")(ViTHost)
    with torch.device("meta"):
        vitrim.reduce_(ViT(Block), "tome:r=4")
    model = ViT(Block).eval().bfloat16()
    vitrim.reduce_(model, "tome:r=4")
    assert model(tiny.images().bfloat16()).isfinite().all()


def test_lists_that_do_not_run_are_refused_with_the_way_to_blocks() -> None:
    class Lists(ViT):
        def run_blocks(self, x: Tensor) -> Tensor:
            for attention, mlp in self.stack["h"]:  # type: ignore[union-attr,misc]
                x = attention(x) + x
                x = mlp(x) + x
            return x

    model = Lists(lambda: nn.ModuleList(pair()))
    registry.register_host(f"{Lists.__module__}.{Lists.__qualname__}")(type("ListsHost", (ViTHost,), {}))
    try:
        with pytest.raises(
            vitrim.UnsupportedModelError, match="a list does not run: make blocks of them, as 'Blocks as"
        ):
            vitrim.reduce_(model, "tome:r=2")
    finally:
        registry._HOSTS.entries.pop(f"{Lists.__module__}.{Lists.__qualname__}")


@pytest.mark.parametrize("make", [Block, pair, Multihead, lambda: Block(separate=True)])
def test_an_unknown_vit_is_told_how_to_be_known(make: Callable[[], nn.Module]) -> None:
    class Unknown(ViT):
        pass

    with pytest.raises(
        vitrim.UnsupportedModelError, match=r"looks like a ViT: .* vitrim\.OwnHost, as 'A model of your own'"
    ):
        vitrim.reduce_(Unknown(make), "tome:r=2")
