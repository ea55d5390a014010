"""Exported models compute what the eager ones do, in every format, at every batch size."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiny
import vitrim
from full_matrix import cells
from vitrim.core.plan import Preprocessing
from vitrim.core.registry import methods
from vitrim.engines import Exported, check
from vitrim.engines.formats.base import DTYPES
from vitrim.engines.parity import _of_torch, highest_share
from vitrim.engines.program import as_read

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
FIXED = [
    "random:seed=1",
    "atm:r=[4,4]",
    "atm:alpha=0.9,beta=0.2,theta_min=0.1,capacity=[30,24]",
    "algm:r=[3,4]",
    "ia_red2:r=[5,4]",
    "ats:keep_rate=0.6",
]
"""Forms with fixed counts of methods that adapt to the images, or draw."""
HOSTS = ("vit", "hf_vit")
SHORT = {
    ("hf_vit", "topk"),  # a selection; an output that is no tensor
    ("vit", "dpc_knn"),  # distances
    ("vit", "ats:keep_rate=0.6"),  # searchsorted, a sort of flags, masks
}
"""Different operators. ToMe's, a stable sort and sums by index, are seen in test_writing.py, and through
OpenVINO in test_precision.py. Sinkhorn, PatchMerger and SiT need none but products; the rest are combinations of these.
"""


def static_methods() -> list[str]:
    """The text of every setting with fixed counts: those of the contract tests and those above."""
    texts = [config.describe() for config in tiny.static_configs() if config.obstacle() is None]
    return [*texts, *FIXED]


def model_for(host: str, method: str) -> nn.Module:
    """A tiny host, as shallow as the method allows."""
    config = vitrim.parse_method(method)
    if config.name in ("atm", "algm", "ia_red2", "ats", "random"):
        model = tiny.HOSTS[host]()
        tiny.drop_last_block(model)
        tiny.drop_last_block(model)
        return model
    return tiny.traceable(host, config)


PAIRS = [(host, method) for host in HOSTS for method in static_methods()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", cells(PAIRS, SHORT), ids="-".join)
def test_onnxruntime_computes_what_the_model_does(pair: tuple[str, str], tmp_path: Path) -> None:
    host, method = pair
    model = model_for(host, method)
    config = tiny.fits(vitrim.parse_method(method), model)
    vitrim.reduce_(model, config)  # before: what a method learns begins at random
    file = vitrim.export(model, None, tmp_path / "m.onnx", check=0)
    for batch in (1, 2, 3):  # by hand, not by `check`
        images = tiny.images(batch, seed=batch)
        with torch.no_grad():
            expected = tiny.logits(model(images))
        assert isinstance(expected, torch.Tensor)
        found = file.run(images.numpy())
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, rtol=0)
        assert (found.argmax(1) == expected.numpy().argmax(1)).all()


@pytest.mark.slow  # compiles for a minute
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler")
def test_aoti_computes_what_the_model_does(tmp_path: Path) -> None:
    model = model_for("vit", "tome:r=4")
    file = vitrim.export(model, "tome:r=4", tmp_path / "m.pt2", check=5, file=vitrim.FileSpec("aoti"))
    again = Exported.open(file.path)
    assert (again.format, again.metadata["method"]) == ("aoti", "tome:r=4")


def test_every_method_is_exported_or_says_why_not(tmp_path: Path) -> None:
    """Those with fixed counts have no obstacle; the others name one, and the way out if there is one."""
    for name, kind in methods().items():
        if kind().obstacle() is None:
            continue
        with pytest.raises(vitrim.VitrimError, match=f"^{name} cannot be exported: ") as caught:
            vitrim.export(tiny.HOSTS["vit"](), name, tmp_path / "m.onnx")
        assert all(
            f"--{way}" in str(caught.value)
            for way in (kind.traits.fixed_by if issubclass(kind, vitrim.Adaptive) else ())
        )
    assert {name for name, kind in methods().items() if kind().obstacle() is not None} == {
        *("a_vit", "algm", "atc", "atm", "ia_red2", "pixelprune", "random", "saint"),
    }
    assert not list(tmp_path.iterdir())


# ---- the comparison itself, of files that are made to differ ---------------------------------------------------------


def differing(change: dict[int, Any], weights: str = "fp32") -> tuple[nn.Module, Exported, torch.Tensor]:
    """A model, a file that gives its logits but for ``change`` of some of 20 images, and these images."""
    model, images = tiny.HOSTS["vit"](), tiny.images(20)
    with torch.no_grad():
        logits = torch.cat([model(image[None]) for image in images]).numpy()
    for image, value in change.items():
        logits[image] = value(logits[image])
    rest = iter(logits)
    metadata = {"weights": weights, "output": {"name": "logits"}, "input": {"dtype": "float32"}}
    file = Exported(Path("m.onnx"), "onnx", {"image": ("batch", *images.shape[1:])}, 0, 0, metadata)
    vars(file)["_run"] = lambda given: np.stack([next(rest) for _ in given])
    return model, file, images


def flipped(logits: Any) -> Any:
    return -logits


def nudged(by: float) -> Any:
    return lambda logits: logits + np.array([by, *[0] * (len(logits) - 1)], logits.dtype)


def blank(logits: Any) -> Any:
    return np.full_like(logits, np.nan)


@pytest.mark.parametrize(
    ("weights", "change", "holds", "beyond"),
    [
        ("fp32", {0: nudged(5e-5)}, True, 0),
        ("fp32", {7: nudged(2e-4)}, False, 1),
        ("fp32", {3: blank}, False, 1),
        ("fp32", {3: lambda logits: np.where(np.arange(len(logits)) == 1, np.inf, logits)}, False, 1),
        ("fp16", dict.fromkeys(range(5), nudged(3e-2)), True, 5),
        ("fp16", dict.fromkeys(range(14, 20), flipped), False, 6),
        ("bf16", dict.fromkeys(range(5), nudged(0.2)), True, 5),
        ("bf16", dict.fromkeys(range(6), nudged(0.2)), False, 6),
    ],
)
def test_as_many_images_may_differ_as_rounding_explains(
    weights: str, change: dict[int, Any], holds: bool, beyond: int
) -> None:
    model, file, images = differing(change, weights)
    found = check(file, model, images)
    assert (found.images, found.batches) == (20, (1, 2, 17))
    assert (found.holds, found.beyond) == (holds, beyond)


def test_another_first_class_is_noticed_however_near_the_logits_are() -> None:
    def swapped(logits: Any) -> Any:
        top = np.sort(logits)[-2:]
        out = np.where(logits == top[1], top[0], logits)
        out[logits.argsort()[-2]] = top[1]
        return out

    model, file, images = differing({4: swapped})
    found = check(file, model, images, atol=1e9)
    assert (found.beyond, found.same_top1, found.holds) == (0, 19, False)
    # in half precision classes change where two are nearly equal: export judges them by their share
    model, file, images = differing(dict.fromkeys(range(15), swapped), "bf16")
    found = check(file, model, images, atol=1e9)
    assert (found.beyond, found.same_top1, found.holds) == (0, 5, True)


# ---- near ties and faults --------------------------------------------------------------------------------------------


def reduced(method: str) -> nn.Module:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, method)
    return model


def running(model: nn.Module, images: torch.Tensor) -> Any:
    """Logits (I, K) of each image on its own."""
    with torch.no_grad():
        return torch.cat([model(image[None]) for image in images]).numpy()


def giving(logits: Any, images: torch.Tensor, weights: str = "fp32") -> Exported:
    """A file for any batch that gives these logits, in order."""
    rest = iter(logits)
    metadata = {"weights": weights, "output": {"name": "logits"}, "input": {"dtype": "float32"}}
    file = Exported(Path("m.onnx"), "onnx", {"image": ("batch", *images.shape[1:])}, 0, 0, metadata)
    vars(file)["_run"] = lambda given: np.stack([next(rest) for _ in given])
    return file


def tie_between(model: nn.Module, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two images that hardly differ, between which the model decides differently: bisected until float32 ends it."""
    low, high = 0.0, 1.0
    reduction = vitrim.get_reduction(model)

    def decided(share: float) -> torch.Tensor:
        with torch.no_grad():
            model((first + share * (second - first))[None])
        return reduction.states[1].source.clone()

    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if torch.equal(decided(middle), decided(low)) else (low, middle)
    return first + low * (second - first), first + high * (second - first)


def test_a_near_tie_is_no_fault() -> None:
    """The file decides one of 20 images as the model decides an image that is 1e-7 away."""
    model, images = tiny.HOSTS["vit"](), tiny.images(20)
    vitrim.reduce_(model, "tome:r=4", record=True)
    images[7], other = tie_between(model, images[7], images[8])
    assert (images[7] - other).abs().max() < 1e-6
    logits = running(model, images)
    logits[7] = running(model, other[None])[0]
    found = check(giving(logits, images), model, images)
    assert (found.beyond, found.near_ties, found.holds) == (1, 1, True)
    assert "(1 beyond 0.0001, 1 of them near ties, which rounding decides)" in str(found)
    logits[7, 0] += 3e-4  # decided as there, and wrong beside it
    found = check(giving(logits, images), model, images)
    assert (found.beyond, found.near_ties, found.holds) == (1, 0, False)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", ["none", "tome:r=4", "topk:keep_rate=0.5"])
def test_half_precision_is_held_to_what_torch_gives_in_it(method: str, precision: str) -> None:
    """The file is the model in torch, in half precision and with attention written out, which rounds otherwise."""
    model, images = reduced(method), tiny.images(64)
    half = copy.deepcopy(model).to(DTYPES[precision])
    for block in half.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        found = torch.cat([half(image[None].to(DTYPES[precision])) for image in images]).float().numpy()
    right = running(model, images)
    assert np.abs(found - right).max() > 1e-4  # what a file in fp32 is held to
    assert check(giving(found, images, precision), model, images).holds
    # wrong in every image
    wrong = running(reduced("tome:r=[8,4,2,1]" if method != "none" else "topk:keep_rate=0.3"), images)
    parity = check(giving(np.roll(wrong, 1, axis=1), images, precision), model, images)
    assert not parity.holds


def test_half_precision_allows_what_torch_needs_in_the_median_image() -> None:
    off = np.array([0.01] * 5 + [0.02] * 5 + [9.0])
    assert _of_torch(off, None)[0] == pytest.approx(0.08)
    assert _of_torch(off / 100, None)[0] == 0.02
    assert _of_torch(np.full(4, np.nan), None)[0] == 0.02  # torch overflows: no file may
    assert _of_torch(np.full(4, np.inf), None)[0] == 0.02
    assert _of_torch(off, 1.0)[0] == 1.0
    assert [_of_torch(np.zeros(count), None)[1] for count in (1, 2, 4, 20)] == [0, 1, 2, 5]  # at most half
    assert _of_torch(np.array([0.0] * 40 + [9.0] * 20), None)[1] == 30


@pytest.mark.parametrize(("found", "count"), [(0, 1), (0, 59), (12, 16), (3, 64), (64, 64), (50, 64), (799, 1000)])
def test_a_bound_is_that_of_clopper_and_pearson(found: int, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = 1.0 if found == count else stats.beta.ppf(0.95, found + 1, count - found)
    assert highest_share(found, count) == pytest.approx(expected, abs=1e-9)


WRONGS = ("shifted indices", "swapped halves", "wrong sizes", "another schedule", "decisions in fp16")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONGS)
def test_a_wrong_file_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is wrong in every image, and if in one."""
    from vitrim.core import assignment, matching
    from vitrim.methods import tome

    model, images = reduced("tome:r=4"), tiny.images(60)
    right = running(model, images)
    other = model
    merge, similar = matching.merge, tome.alternate_similarity
    if wrong == "shifted indices":
        monkeypatch.setattr(tome, "alternate_similarity", lambda *given: similar(*given).roll(1, dims=2))
    elif wrong == "swapped halves":
        monkeypatch.setattr(tome, "alternate_similarity", lambda *given: similar(*given).mT)
    elif wrong == "wrong sizes":
        monkeypatch.setattr(assignment.Hard, "_sizes", lambda self, state, gained=None: torch.ones(self.anchor.shape))
        monkeypatch.setattr(assignment.Hard, "_suits_loop", lambda *_: False)
    elif wrong == "another schedule":
        other = reduced("tome:r=[5,3,4,4]")
    else:
        monkeypatch.setattr(tome, "alternate_similarity", lambda *given: similar(*given).half().float())
    found = running(other, images)
    monkeypatch.undo()
    assert matching.merge is merge
    differs = np.flatnonzero(np.abs(found - right).max(1) > 1e-4)
    assert len(differs)
    assert not check(giving(found, images), model, images).holds
    for place in differs[-1:]:  # of the batch of 57: as many changed images run at once
        once = right.copy()
        once[place] = found[place]
        parity = check(giving(once, images), model, images)
        assert (parity.beyond, parity.near_ties, parity.holds) == (1, 0, False)


@pytest.mark.parametrize(("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3)])
def test_bytes_come_back_as_they_were(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """All 256 values of all channels, through the normalisation that torchvision has."""
    from torchvision.transforms.v2.functional import normalize

    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    told = Preprocessing(channels=3, size=(16, 16), mean=mean, std=std)
    assert torch.equal(as_read(normalize(pixels / 255, mean, std), told), pixels.permute(0, 2, 3, 1))
    beyond = as_read(torch.tensor([-9.0, 9.0, 0.0]).view(1, 3, 1, 1), told)
    assert beyond.flatten()[:2].tolist() == [0, 255]
