"""Graphs for single images whose numbers of tokens follow from the image: as PyTorch has it, image by image."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
import vitrim
from full_matrix import cells
from vitrim.core.attention import Attention
from vitrim.core.plan import Layer
from vitrim.core.registry import methods
from vitrim.engines import Exported
from vitrim.engines.program import Program, trace
from vitrim.methods import atm, saint

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
SETTINGS = {
    "atm": "atm:alpha=0.9,beta=0.2,theta_min=0.1",
    "atm by image": "atm:alpha=0.9,beta=0.2,theta_min=0.1,granularity=image,splitting_layer=1",
    "ia_red2": "ia_red2:blocks=[0,1]",
    "saint": "saint:threshold=0.3,neighbours=2,blocks=[0,1]",
    "algm": "algm:threshold=0.2,local_block=0,global_block=1",
    "pixelprune": "pixelprune",
    "pixelprune alike": "pixelprune:tau=0.57,distance=mae,std=0.5",
    "a_vit": "a_vit:gate_scale=1.0,gate_center=1.0",
}


def images() -> Tensor:
    """Six of noise, one of which nothing can be told apart, and one whose upper half is like that."""
    found = torch.cat([tiny.images(6), torch.zeros_like(tiny.images(2))])
    found[7, :, found.shape[2] // 2 :] = found[0, :, found.shape[2] // 2 :]
    return found


def reduced(name: str) -> tuple[nn.Module, Any]:
    """A tiny model of three blocks, with its reduction: what a method learns is there, and the same every time."""
    model = tiny.HOSTS["vit"]()
    tiny.drop_last_block(model)
    torch.manual_seed(0)
    return model, vitrim.reduce_(model, SETTINGS[name], record=True)


GRAPHS: dict[str, vitrim.MethodConfig] = {
    "atm": vitrim.ATM(theta=(0.999, 0.1, 0.1, 0.1)),
    "atm by size": vitrim.ATM(theta=(0.999, 0.1, 0.1, 0.1), splitting_layer=0),
    "saint": vitrim.SAINT(threshold=(0.999, 0.3), neighbours=2, blocks=(0, 1)),
}
"""Settings whose first block finds no pair that is alike enough, and whose second one does."""


def decided(config: vitrim.MethodConfig, x: Tensor, state: vitrim.TokenState) -> list[tuple[Tensor, Tensor]]:
    """Tokens and sources after each of two blocks, which compare the tokens themselves."""
    found = []
    for depth in (0, 1):
        reducer = tiny.reducer(config, Layer(depth, 4, x.shape[2], 1, 0, state.num_prefix, True, (6, 6)))
        hard = reducer(x, Attention(x[:, None], x[:, None], None, 1.0), state)
        if hard is not None:
            x, state = hard.apply(x, state)
        found.append((x, state.source))
    return found


@pytest.mark.parametrize("num_prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_decides_as_the_model_does_also_behind_a_block_that_merges_nothing(
    name: str, num_prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an export: the decisions of a graph are computed image by image, beside those of the model.

    A block that merges nothing has to leave the order alone, since the next one splits by place; and prefix tokens
    count where the smaller half of the tokens is taken.
    """
    for patches in (36, 35, 9, 2, 1):
        x = torch.randn(1, num_prefix + patches, 6, dtype=torch.float64)
        state = vitrim.TokenState.start(x, num_prefix=num_prefix)
        if name == "atm by size":
            state = replace(state, size=torch.randint(1, 4, (1, x.shape[1])).double(), uniform=False)
        expected = decided(GRAPHS[name], x, state)
        with monkeypatch.context() as patch:
            for module in (atm, saint):
                patch.setattr(module, "sizes_follow", lambda _: True)
            found = decided(GRAPHS[name], x, state)
        torch.testing.assert_close(expected[0][0], x)  # nothing was alike enough
        assert patches < 35 or expected[1][0].shape[1] < x.shape[1] - 5
        for (tokens, source), (own, other) in zip(found, expected, strict=True):
            torch.testing.assert_close(tokens, own)
            assert torch.equal(source, other)


class Counting(Program):
    """Logits (1, K), and behind them the tokens left after each block."""

    def __init__(self, model: nn.Module, reduction: Any) -> None:
        super().__init__(model)
        self.reduction = [reduction]  # not a module of this one

    def forward(self, image: Tensor) -> Tensor:
        logits = super().forward(image)
        left = [torch.ones_like(state.size).sum(1, keepdim=True) for state in self.reduction[0].states[1:]]
        return torch.cat([logits, *left], dim=1)


def test_the_methods_are_those_that_say_so() -> None:
    assert {name.split()[0] for name in SETTINGS} == {
        name for name, kind in methods().items() if kind.traits.single_images
    }
    for text in SETTINGS.values():
        config = vitrim.parse_method(text)
        assert config.in_graph(1) is None
        assert config.in_graph(2) == config.in_graph(None) == config.obstacle() is not None
    assert vitrim.parse_method("random").in_graph(1) is not None
    assert vitrim.parse_method("tome").in_graph(8) is None


@pytest.mark.parametrize("name", cells(SETTINGS, ["atm", "saint", "a_vit", "pixelprune"]))
def test_a_program_has_the_logits_and_the_counts_of_the_model(name: str) -> None:
    model, reduction = reduced(name)
    expected, counts = [], []
    for image in images():
        with torch.no_grad():
            expected.append(model(image[None]))
        counts.append([state.num_tokens for state in reduction.states[1:]])
    assert len({tuple(each) for each in counts}) > 1  # they do follow from the image
    program = trace(Counting(model, reduction).eval(), images()[:1], False).module()
    with torch.no_grad():
        found = torch.cat([program(image[None]) for image in images()])
    classes = expected[0].shape[1]
    torch.testing.assert_close(found[:, :classes], torch.cat(expected), atol=1e-5, rtol=0)
    assert found[:, classes:].tolist() == counts


@pytest.mark.slow
@pytest.mark.parametrize("name", cells(SETTINGS, ("atm",)))
@pytest.mark.parametrize("suffix", cells([".onnx", ".xml"], (".onnx",)))
def test_engines_compute_what_the_model_does(name: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".xml" and importlib.util.find_spec("openvino") is None:
        pytest.skip("no OpenVINO")
    model, reduction = reduced(name)
    file = vitrim.export(model, None, tmp_path / f"m{suffix}", check=images(), file=vitrim.FileSpec(batch=1))
    assert file.inputs["image"][0] == 1
    left = []
    for image in images():
        with torch.no_grad():
            expected = model(image[None]).numpy()
        left.append(reduction.mean_tokens_per_block)
        np.testing.assert_allclose(file.run(image[None].numpy()), expected, atol=1e-4, rtol=0)
    known = Exported.open(file.path).metadata
    assert known["tokens_per_block"] == pytest.approx(np.mean(left, axis=0))
    assert known["counts_deviation"] == pytest.approx(np.std(left, axis=0))
    assert known["counted_on"] == "8 images"
    assert 0 < known["gmacs_deviation"] < known["gmacs"] < known["dense_gmacs"]


def test_random_images_are_not_timed(tmp_path: Path) -> None:
    message = "--bench times random images, and how long atm takes depends on the images"
    with pytest.raises(vitrim.VitrimError, match=message):
        vitrim.export(tiny.HOSTS["vit"](), "atm", tmp_path / "m.onnx", bench=True, file=vitrim.FileSpec(batch=1))
    assert not list(tmp_path.iterdir())


def test_other_batches_are_refused_with_the_ways_out(tmp_path: Path) -> None:
    message = (
        r"atm cannot be exported: how many tokens it keeps depends on the images; for single images it can as it is: "
        r"--batch 1; find fixed counts on images by --freeze or --capacity"
    )
    for batch in (None, 2):
        with pytest.raises(vitrim.VitrimError, match=message):
            vitrim.export(tiny.HOSTS["vit"](), "atm", tmp_path / "m.onnx", file=vitrim.FileSpec(batch=batch))
    assert not list(tmp_path.iterdir())


class Counts(nn.Module):
    """Takes its batch for a constant, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 3, 4, 4))

    def forward(self, images: Tensor) -> Tensor:
        return (images + self.token.expand(len(images), -1, -1, -1)).mean((2, 3))


def test_a_batch_that_is_a_constant_is_named_with_the_ways_out() -> None:
    images = torch.zeros(2, 3, 4, 4)
    with pytest.raises(vitrim.VitrimError, match=r"^Counts takes the size of a batch for a constant, .*x\.shape\[0\]"):
        trace(Program(Counts()), images, dynamic=True)
    trace(Program(Counts()), images, dynamic=False)
