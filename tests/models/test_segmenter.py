"""Segmenter: its decoders against their formulas, images of any size, places of patches on every host, counts."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tiny
import vitrim
from dense_models import CLASSES, segmenter
from vitrim.engines.macs import count_macs
from vitrim.loading import create_model
from vitrim.models.segmenter import LinearDecoder, MaskTransformer, Segmenter

RELEASED = (
    "cls_emb", "proj_patch", "proj_classes", "proj_dec.weight", "proj_dec.bias", "decoder_norm.weight",
    "decoder_norm.bias", "mask_norm.weight", "mask_norm.bias",
    *(f"blocks.{layer}.{part}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
      for part in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
)  # fmt: skip
"""The parameters of a released mask transformer of two layers, behind ``decoder.``"""


def transcription(state: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    """The formula of the mask transformer on tokens (P, C) of one image, from a state dict with the released names."""

    def linear(name: str, tokens: Tensor) -> Tensor:
        return tokens @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, tokens: Tensor) -> Tensor:
        centred = tokens - tokens.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + (1e-6 if "blocks" in name else 1e-5)).sqrt()
        return centred / scale * state[f"{name}.weight"] + state[f"{name}.bias"]

    classes = state["cls_emb"].shape[1]
    x = torch.cat([linear("proj_dec", x), state["cls_emb"][0]])
    width = x.shape[1] // heads
    for layer in (0, 1):
        q, k, v = linear(f"blocks.{layer}.attn.qkv", norm(f"blocks.{layer}.norm1", x)).chunk(3, dim=1)
        parts = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            weights = (q[:, own] @ k[:, own].T / math.sqrt(width)).softmax(dim=1)
            parts.append(weights @ v[:, own])
        x = x + linear(f"blocks.{layer}.attn.proj", torch.cat(parts, dim=1))
        hidden = linear(f"blocks.{layer}.mlp.fc1", norm(f"blocks.{layer}.norm2", x))
        x = x + linear(f"blocks.{layer}.mlp.fc2", 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))))
    x = norm("decoder_norm", x)
    patches, tokens = x[:-classes] @ state["proj_patch"], x[-classes:] @ state["proj_classes"]
    patches = patches / patches.norm(dim=1, keepdim=True)
    tokens = tokens / tokens.norm(dim=1, keepdim=True)
    return norm("mask_norm", patches @ tokens.T)


def test_the_mask_transformer_is_its_formula_under_the_released_names() -> None:
    torch.manual_seed(0)
    decoder = MaskTransformer(32, num_classes=3, heads=2).double().eval()
    state = {name: torch.randn_like(value) for name, value in decoder.state_dict().items()}
    assert set(state) == set(RELEASED)
    decoder.load_state_dict(state)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    expected = torch.stack([transcription(state, image, heads=2) for image in x])
    torch.testing.assert_close(decoder(x), expected, atol=1e-10, rtol=1e-10)


def test_tokens_that_stand_for_several_patches_are_attended_to_as_so_many() -> None:
    torch.manual_seed(0)
    decoder = MaskTransformer(32, num_classes=3, heads=2).double().eval()
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    size = torch.tensor([[1.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    copies = torch.tensor([0, 1, 1, 1, 2, 2, 3])
    torch.testing.assert_close(decoder(x, size)[:, copies], decoder(x[:, copies]), atol=1e-10, rtol=1e-10)
    decoder.proportional = False
    assert torch.equal(decoder(x, size), decoder(x))


# ---- images of any size ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def any_size() -> Segmenter:
    return segmenter("dynamic_img_size")


@given(height=st.integers(9, 40), width=st.integers(9, 40))
def test_logits_are_as_large_as_the_images(any_size: Segmenter, height: int, width: int) -> None:
    images = torch.randn(2, 3, height, width)
    with torch.no_grad():
        logits = any_size(images)
        tokens, grid = any_size.tokens(images)
    assert logits.shape == (2, CLASSES, height, width)
    assert grid == (-(-height // 4), -(-width // 4))
    assert tokens.shape == (2, grid[0] * grid[1], 32)


def test_padding_is_zeros_at_the_right_and_bottom(any_size: Segmenter) -> None:
    images = torch.randn(1, 3, 22, 21)
    with torch.no_grad():
        whole = any_size(F.pad(images, (0, 3, 0, 2)))
        assert torch.equal(any_size(images), whole[:, :, :22, :21])


@pytest.mark.parametrize("size", [36, 47])
def test_a_size_that_ends_within_a_patch_leaves_patches_as_they_are(size: int) -> None:
    """The model was made for 4 or 5 whole patches of 8 pixels and a rest; its head counts patches of 8, too."""
    options = {"img_size": size, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": CLASSES}
    model = create_model("segmenter:vit_tiny_patch16_224", options=options).eval()
    assert model.layout.patch_size == model.backbone.patch_embed.patch_size == (8, 8)
    changed = torch.zeros(1, 3, size, size)
    changed[:, :, 8:16, 24:32] = 1  # row 1, column 3
    with torch.no_grad():
        embedded = [model.backbone.patch_embed(F.pad(x, (0, -size % 8, 0, -size % 8))) for x in (changed, 0 * changed)]
        tokens, grid = model.tokens(changed)
        logits = model(changed)
    assert grid == (-(-size // 8),) * 2
    assert tokens.shape[1] == grid[0] * grid[1]
    assert (embedded[0] != embedded[1]).any(-1)[0].nonzero().tolist() == [[1, 3]]
    assert logits.shape == (1, CLASSES, size, size)


@pytest.mark.parametrize("host", ["beit", "torchvision_vit", "vit"])
def test_hosts_of_one_size_say_so(host: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=r"images of 28 x 32 px: this .* takes 24 x 24 only"):
        segmenter(host)(tiny.images(size=32)[:, :, :28])


@pytest.mark.parametrize("host", ["hf_vit", "hf_dinov2", "hf_clip", "naflex"])
def test_hosts_that_interpolate_their_positions_take_other_sizes(host: str) -> None:
    images = tiny.images(size=32)[:, :, :28]
    with torch.no_grad():
        assert segmenter(host)(images).shape == (2, CLASSES, 28, 32)


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("host", tiny.BACKBONES)
@pytest.mark.parametrize("method", [None, "tome:r=0"])
def test_row_i_of_the_tokens_is_patch_i(host: str, method: str | None) -> None:
    """The token that a change of one patch changes most is that of the patch."""
    model = segmenter(host, dtype=torch.float64)
    if method is not None:
        vitrim.reduce_(model, method)
    images = tiny.images(1).double()
    with torch.no_grad():
        before, grid = model.tokens(images)
        assert grid == (6, 6)
        for patch in (0, 8, 23, 30):
            row, column = divmod(patch, 6)
            changed = images.clone()
            changed[:, :, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1e-4
            after, _ = model.tokens(changed)
            found = divmod(int((after - before).norm(dim=-1).argmax()), 6)
            away = max(abs(found[0] - row), abs(found[1] - column))
            assert away <= (2 if host.startswith(("lv_vit", "t2t_vit")) else 0)  # whose stems overlap


@pytest.mark.sampled(5)
@pytest.mark.parametrize("decoder", ["linear", "mask_transformer"])
@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_every_method_gives_logits_at_every_place_or_is_refused(config: vitrim.MethodConfig, decoder: str) -> None:
    model, images = segmenter(decoder=decoder), tiny.images()
    if config.kind == "soft" or (config.kind == "prune" and config.is_adaptive()):
        with pytest.raises(vitrim.UnsupportedModelError, match="a dense head reads every patch at its place"):
            vitrim.reduce_(model, config)
        return
    with torch.no_grad():
        dense = model(images)
        reduction = vitrim.reduce_(model, config, record=True)
        out = model(images)
        vitrim.restore_(model)
        assert torch.equal(model(images), dense)
    assert out.shape == dense.shape
    assert out.isfinite().all()
    assert config.kind == "none" or min(state.num_tokens for state in reduction.states) < 37
    assert config.kind == "none" or not torch.equal(out, dense)


# ---- merged tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tome:r=4", "topk", "evit", "tofu", "algm:threshold=0.5"])
def test_a_linear_decoder_of_merged_tokens_is_that_of_all(method: str) -> None:
    outputs = []
    for decoder_tokens in ("all", "merged"):
        model = segmenter(dtype=torch.float64, decoder_tokens=decoder_tokens)
        vitrim.reduce_(model, method)
        with torch.no_grad():
            outputs.append(model(tiny.images().double()))
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)


def test_a_mask_transformer_of_merged_tokens_is_that_of_all() -> None:
    """Log-size attention is exact for copies, class tokens and patches alike."""
    outputs, macs = [], []
    for decoder_tokens in ("all", "merged"):
        model = segmenter(decoder="mask_transformer", dtype=torch.float64, decoder_tokens=decoder_tokens)
        reduction = vitrim.reduce_(model, "tome:r=4")
        with torch.no_grad():
            outputs.append(model(tiny.images().double()))
        macs.append(count_macs(model, tiny.images(1).double()).total)
        assert reduction.state.num_patches == 20
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)
    assert macs[1] < macs[0]


def test_pruned_places_of_merged_scores_are_zero_if_nothing_comes_back() -> None:
    model = segmenter(decoder_tokens="merged")
    reduction = vitrim.reduce_(model, "topk:restore=zeros")
    seen: list[Tensor] = []
    model.decoder.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        tokens = model.library.tokens(model.backbone, tiny.images())
        scores = model.scores(tokens, (6, 6))
    gone = reduction.state.source[:, 1:] < 0
    assert gone.any()
    assert (scores[gone] == 0).all()
    assert seen[0].shape[1] == reduction.state.num_patches


def test_copies_and_pickles_decode_their_own_tokens() -> None:
    model = segmenter(decoder_tokens="merged")
    vitrim.reduce_(model, "tome:r=4")
    with torch.no_grad():
        expected = model(tiny.images())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.trace is twin.backbone.blocks[0].trace
            assert twin.trace is not model.trace
            assert torch.equal(twin(tiny.images()), expected)
    vitrim.restore_(model)
    assert model.trace is None


# ---- names and options -----------------------------------------------------------------------------------------------

TINY = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}


def test_options_go_to_the_head_or_to_the_backbone() -> None:
    options = {**TINY, "num_classes": 3, "decoder": "mask_transformer", "decoder_layers": 1, "decoder_width": 8}
    model = create_model("segmenter:vit_tiny_patch16_224", options={**options, "decoder_heads": 2})
    assert isinstance(model, Segmenter)
    assert isinstance(model.decoder, MaskTransformer)
    assert len(model.decoder.blocks) == 1
    assert model.decoder.cls_emb.shape == (1, 3, 8)
    assert model.layout.patch_size == (16, 16)
    assert model(torch.zeros(1, 3, 40, 24)).shape == (1, 3, 40, 24)


def test_distilled_and_pooling_backbones_hand_out_tokens() -> None:
    for name in ("deit_tiny_distilled_patch16_224", "vit_base_patch16_siglip_224"):
        model = create_model(f"segmenter:{name}", options={**TINY, "num_classes": 3})
        assert model(torch.zeros(1, 3, 48, 32)).shape == (1, 3, 48, 32)


VIT = "vit_tiny_patch16_224"
WINDOWS = {"window_size": 4}
BAD: list[tuple[str, dict[str, object], str]] = [
    ("segmenter:resnet18", {}, "ResNet hands out no tokens that a dense head could read"),
    (f"segmenter:{VIT}", {"num_classes": 0}, "num_classes=0"),
    (f"segmenter:{VIT}", {"decoder": "upernet"}, "decoder=upernet: must be 'linear' or 'mask_tr"),
    (f"segmenter:{VIT}", {"decoder_layers": 1}, "decoder_layers goes with decoder=mask_transformer"),
    (f"segmenter:{VIT}", {"decoder_tokens": "some"}, "decoder_tokens=some: must be 'all' or 'merged'"),
    (f"segmenter:{VIT}", {"decoder": "mask_transformer", "decoder_heads": 5}, "5 heads .* 192 chan"),
    (f"segmenter:{VIT}", {"decoder": "mask_transformer", "decoder_dropout": 2}, "number from 0 to 1"),
    (f"segmenter:{VIT}", {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
    ("segmenter:vit_tinny_patch16_224", {}, "unknown model 'vit_tinny_patch16_224'; did you mean"),
    ("segmenter:", {}, "names no model"),
    (f"segmentor:{VIT}", {}, "unknown library 'segmentor'; did you mean 'segmenter'"),
    (f"vitdet:{VIT}", {"windows": 14}, "windows: unknown option; windows of S x S patches are window_size=S"),
    (f"vitdet:{VIT}", {"masks": 1}, "masks=1: must be true or false"),
    (f"vitdet:{VIT}", {"maskness": 0.5}, "it goes with masks=true"),
    (f"vitdet:{VIT}", {"soft_nms": 2}, "soft_nms=2: must be at most 1"),
    (f"vitdet:{VIT}", {"channels": 0}, "channels=0: must be at least 1"),
    (f"vitdet:{VIT}", {"num_classes": 0}, "num_classes=0"),
    (f"vitdet:{VIT}", {"global_blocks": [1]}, "they go with window_size$"),
    (f"vitdet:{VIT}", {**WINDOWS, "depth": 2, "global_blocks": [0]}, "0 is no block of a model of 2"),
    (f"vitdet:{VIT}", {**WINDOWS, "depth": 2, "global_blocks": [3]}, "3 is no block of a model of 2"),
    (f"vitdet:{VIT}", {**WINDOWS, "global_blocks": 2}, "global_blocks=2: must be a list"),
    (f"vitdet:{VIT}", {"window_size": 0}, "window_size=0: must be at least 1"),
    ("vitdet:beit_base_patch16_224", WINDOWS, "not Beit with its attention"),
    ("vitdet:vit_small_patch16_rope_mixed_224", WINDOWS, "the same in every block"),
]
"""Names and options of models with a dense head."""


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_names_and_options_are_one_line(name: str, options: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(vitrim.VitrimError, match=message):
        create_model(name, options=options)


def test_a_backbone_reduced_alone_by_pruning_is_refused_with_a_hint() -> None:
    model = segmenter()
    vitrim.reduce_(model.backbone, "topk:keep_rate=0.5")
    with pytest.raises(vitrim.VitrimError, match="reduce the whole model instead of its backbone"):
        model(tiny.images())


def test_a_new_decoder_is_of_the_same_kind() -> None:
    for kind in (LinearDecoder, MaskTransformer):
        model = segmenter(decoder="linear" if kind is LinearDecoder else "mask_transformer", dtype=torch.float64)
        model.reset_classifier(9)
        assert isinstance(model.decoder, kind)
        assert model(tiny.images().double()).shape == (2, 9, 24, 24)


# ---- counts ----------------------------------------------------------------------------------------------------------

GIGA = 1e9
SLOW = pytest.mark.slow  # seconds each
TRUNKS = [
    pytest.param("vit_small_patch16_224", 512, {},
                 {"none": 31.7, "tome:r=40": 23.1, "tome:r=64": 18.4, "cropr:r=80": 18.9}, id="small-512"),
    pytest.param("eva02_large_patch14_224", 512, {"patch_size": 16}, {
        "none": 361.9, "cropr:r=40": 204.3, "cropr:r=40,fusion=concat": 191.1, "cropr:r=40,fusion=none": 190.5},
                 id="eva02-512"),
]  # fmt: skip
"""Backbone, image size, its options, and GMACs of the trunk by method: linear, attention and matching, no norms."""


@pytest.mark.slow  # `measure/test_macs.py` has the counts of ViTs
@pytest.mark.parametrize(("name", "size", "options", "expected"), TRUNKS)
def test_macs_of_trunks_to_the_printed_digits(name: str, size: int, options, expected: dict[str, float]) -> None:
    model = create_model(f"segmenter:{name}", options={"img_size": size, **options}, device="meta")
    images = torch.empty(1, 3, size, size, device="meta")
    found = {}
    for method in expected:
        vitrim.reduce_(model, method)
        found[method] = round(count_macs(model.backbone, images).under("no-norm") / GIGA, 1)
        vitrim.restore_(model)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "size", "expected", "printed"),
    [
        ("tiny", 512, 12.6, 12.8),
        pytest.param("small", 512, 38.4, 38.6, marks=SLOW),
        pytest.param("base", 512, 129.3, 130, marks=SLOW),
        pytest.param("large", 640, 671, 672, marks=SLOW),
    ],
)
def test_macs_of_whole_segmenters(name: str, size: int, expected: float, printed: float) -> None:
    options = {"img_size": size, "decoder": "mask_transformer", "num_classes": 150}
    model = create_model(f"segmenter:vit_{name}_patch16_224", options=options, device="meta")
    macs = count_macs(model, torch.empty(1, 3, size, size, device="meta"))
    assert round(macs.under("no-norm") / GIGA, 0 if expected > 200 else 1) == expected
    assert macs.total / GIGA == pytest.approx(printed, rel=0.015)


def test_scores_are_enlarged_between_the_centres_of_patches() -> None:
    """A row of two patches, 0 and 1, in pixels of 4 to a patch, by hand: half-pixel centres, as timm and mmseg do."""
    model = segmenter()
    model.scores = lambda tokens, grid: torch.arange(grid[1]).float().repeat(grid[0])[None, :, None]  # type: ignore[method-assign]
    with torch.no_grad():
        row = model(tiny.images())[0, 0, 9, :8]
    torch.testing.assert_close(row, torch.tensor([0.0, 0.0, 0.125, 0.375, 0.625, 0.875, 1.125, 1.375]))


def test_a_new_decoder_keeps_every_setting() -> None:
    old = MaskTransformer(32, 3, layers=1, width=16, heads=2, dropout=0.3, drop_path=0.2, proportional=False)
    new = old.renewed(5)
    assert new.proportional is False
    assert new.settings == old.settings
    sizes = {name: tuple(value.shape) for name, value in old.named_parameters()}
    for name, value in new.named_parameters():
        assert tuple(5 if side == 3 else side for side in sizes[name]) == tuple(value.shape)
    assert [(type(m), getattr(m, "p", None)) for m in new.modules()] == [
        (type(m), getattr(m, "p", None)) for m in old.modules()
    ]
