"""Models that nothing reduces, in every command that can say something of a dense model: `none` is that model."""

from functools import cache

import numpy as np
import pytest
import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

import image_files
import vitrim
from full_matrix import cells
from vitrim.analysis.analyze import analyze_records
from vitrim.core.registry import fitting, input_size_of, parse_method
from vitrim.data import ImageDataset, eval_transform
from vitrim.errors import UnsupportedModelError
from vitrim.loading import ModelSpec, create_model
from vitrim.measure.task_data import num_classes

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
CLASSES = 3


class OwnBlock(Block):
    """A user's block."""

    def forward(self, x, **given):
        return super().forward(x, **given) * 0.5


SMALL = {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2}
STAGES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}
BRANCHES = {"embed_dim": [8, 16], "depth": [[1, 1, 0]], "num_heads": [2, 2]}
MODELS = {
    "vittm": ("vittm_small_28_28", {**SMALL, "img_size": 56}),
    "rev_vit": ("rev_vit_base", SMALL),
    "lookupvit": ("lookupvit_shared_base_5", {**SMALL, "compressed_grid": 1}),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": 56, **STAGES}),
    "convnext": ("convnext_atto", {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8]}),
    "crossvit": ("crossvit_9_240", {"img_size": 48, "img_scale": [1.0, 1.0], **BRANCHES}),
}
"""Of timm and of vitrim, small: by name on the command line, and options."""
OWN = {"own blocks": {"block_fn": OwnBlock}, "own attention": {"attn_layer": DiffAttention}}
"""Of a supported class, with parts that no family knows."""
ALONE = [*MODELS, *OWN]
LABELS = [0, 1, 2, 0]
QUICK = {"budget": vitrim.Budget(1, min_seconds=0.0)}


@cache
def made(name: str) -> nn.Module:
    """The model with shaken heads: some start at zero, and then predict nothing."""
    torch.manual_seed(0)
    if name in OWN:
        small = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
        model = VisionTransformer(**small, num_classes=CLASSES, **OWN[name]).eval()
    else:
        model = create_model(MODELS[name][0], options={**MODELS[name][1], "num_classes": CLASSES})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def pictures():
    colours = [(200, 30, 60), (10, 220, 90), (90, 90, 250), (250, 250, 10)]
    return [image_files.Image.new("RGB", (60, 60), colour) for colour in colours]


@pytest.fixture(scope="module")
def data(pictures):
    return ImageDataset([image_files.encoded(picture) for picture in pictures], LABELS)


def classes_of(model, pictures):
    """The classes by a plain loop, of images as the model takes them."""
    transform = eval_transform(model)
    with torch.inference_mode():
        return [model(transform(picture)[None]).argmax(1).item() for picture in pictures]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("methods", ["none", None])
def test_evaluate_counts_what_the_model_predicts(name, methods, data, pictures):
    model = made(name)
    first = classes_of(model, pictures)
    (row,) = vitrim.evaluate(model, methods, vitrim.ScoredData(data, batch_size=3)).rows
    expected = np.mean([found == label for found, label in zip(first, LABELS, strict=True)])
    assert row["method"] == "dense"
    assert row["top1"] == expected
    assert row["agreement"] == 1.0
    assert row["cosine"] == pytest.approx(1.0)
    assert row["tokens_at_end"] == (None if name in MODELS else 17)
    assert sum(row["gmacs"].values()) > 0


@pytest.mark.parametrize("name", ALONE)
def test_bench_and_compare_time_it(name, data):
    model = made(name)
    methods = "none" if name in MODELS else None
    (row,) = vitrim.bench(model, methods, batch_size=2, **QUICK).rows
    assert (row["method"], row["speedup"], row["macs_speedup"]) == ("dense", 1.0, 1.0)
    (row,) = vitrim.compare(model, methods, data, at=2, **QUICK).rows
    assert (row["method"], row["loss"], len(row["speeds"])) == ("dense", 0.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", cells(ALONE, ["swin", "vittm", "own blocks"]))
def test_export_writes_what_it_computes(name, tmp_path):
    model = made(name)
    file = vitrim.export(model, "none", tmp_path / "model.pt2", check=3)
    images = torch.randn(2, *input_size_of(model))
    with torch.inference_mode():
        assert np.allclose(file.run(images.numpy()), model(images).numpy(), atol=1e-4)
    assert (file.metadata["method"], file.metadata["tokens_per_block"]) == ("none", None)


@pytest.mark.parametrize("name", ["vittm", "swin", "own attention"])
def test_analyze_writes_a_summary(name, data, pictures, tmp_path):
    model = made(name)
    report = vitrim.analyze(model, "none", data, out=tmp_path / "report")
    (row,) = report.tables[0].records()
    right = np.mean(np.array(classes_of(model, pictures)) == LABELS)
    assert row["top1 %"] == pytest.approx(100 * right)
    assert (tmp_path / "report" / "index.html").is_file()
    again = analyze_records([tmp_path / "report" / "record_dense.npz"], out=tmp_path / "again")
    assert next(iter(again.tables[0].records()))["top1 %"] == row["top1 %"]


def test_a_segmenter_around_it_is_scored():
    options = {**MODELS["vittm"][1], "num_classes": CLASSES}
    model = create_model("segmenter:vittm_small_28_28", options=options)
    batch = (torch.randn(2, 3, 56, 56), torch.randint(CLASSES, (2, 56, 56)))
    (row,) = vitrim.evaluate(model, "none", [batch]).rows
    found = model(batch[0]).argmax(1)
    ious = [
        ((found == k) & (batch[1] == k)).sum().item() / ((found == k) | (batch[1] == k)).sum().item()
        for k in range(CLASSES)
    ]
    assert row["mIoU"] == pytest.approx(np.mean(ious))


@pytest.mark.parametrize("name", ALONE)
def test_every_other_method_is_refused_in_a_line(name, data, tmp_path):
    model, kind = made(name), type(made(name)).__name__
    for call in (
        lambda: vitrim.evaluate(model, "tome:r=1", data),
        lambda: vitrim.bench(model, ["none", "tome:r=1"], batch_size=1, **QUICK),
        lambda: vitrim.compare(model, "tome:r=1", data, at=1, **QUICK),
        lambda: vitrim.export(model, "tome:r=1", tmp_path / "m.pt2"),
        lambda: vitrim.profile(model, "tome:r=1"),
    ):
        with pytest.raises(UnsupportedModelError, match=kind):
            call()
    if name in OWN:  # a family knows their class, and refuses them itself
        return
    with pytest.raises(UnsupportedModelError, match=r"tome:r=1: .*; none measures this model as it is"):
        fitting(model, [parse_method("none"), parse_method("tome:r=1")])


@pytest.mark.parametrize("name", OWN)
def test_it_takes_the_images_that_its_library_knows_of(name):
    model = made(name)
    assert input_size_of(model) == (3, 32, 32)
    (row,) = vitrim.profile(model).rows
    fc = sum(one.weight.numel() for one in model.modules() if isinstance(one, nn.Linear) and one is not model.head)
    patches = model.patch_embed.proj.weight.numel() * 16
    assert row["gmacs"]["linear"] * 1e9 == pytest.approx(17 * fc + patches + model.head.weight.numel())


def test_a_model_that_takes_methods_asks_for_one():
    model = create_model("test_vit", options={"img_size": 32, "depth": 1})
    with pytest.raises(vitrim.VitrimError, match=r"name at least one method, e.g. -m tome:keep_rate=0.7; `vitrim list"):
        vitrim.bench(model, batch_size=1)


def test_a_model_without_a_size_says_so():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    with pytest.raises(UnsupportedModelError, match="Sequential does not say what images it takes"):
        input_size_of(model)
    model.image_size = (8, 12)
    assert input_size_of(model) == (3, 8, 12)
    model.num_classes = 7
    assert num_classes(ModelSpec(model).load()) == 7
