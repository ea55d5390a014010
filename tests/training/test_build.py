"""A run from its parts: data that are held out, starting weights, and what many processes share."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import tiny
from tiny_training import recipe, trainer
from vitrim.data.load import hold_out
from vitrim.errors import VitrimError
from vitrim.loading import load_run
from vitrim.tasks import make_task
from vitrim.training import loop
from vitrim.training.build import make_accelerator, mimetic_, open_data
from vitrim.training.learner import Learner
from vitrim.training.recipe import load_recipe, recipes


@pytest.mark.parametrize(
    ("host", "checkpointing", "looks"),
    [("hf_vit", False, True), ("hf_vit", True, False), ("vit", False, False), ("torchvision_vit", False, False)],
)
def test_many_processes_look_for_idle_parameters_where_there_may_be_some(
    host: str, checkpointing: bool, looks: bool
) -> None:
    """By the model, not by how it was named: a finished run of a Hugging Face model has them, too."""
    options = recipe(model="run:folder", grad_checkpointing=checkpointing).recipe
    accelerator = make_accelerator(options, cpu=True)
    Learner(options, tiny.HOSTS[host](), make_task("classification", 3), accelerator, 1)
    assert accelerator.ddp_handler is not None
    assert accelerator.ddp_handler.to_kwargs().get("find_unused_parameters", False) is looks


WATCHED = {"eval_split": 0.25, "test_split": "test"}


@pytest.mark.slow
def test_a_share_is_held_out_and_the_test_images_are_scored_once(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, list[str]]] = []
    evaluate = loop.evaluate

    def seen(model: Any, task: Any, data: Any, *rest: Any, **options: Any) -> dict[str, float]:
        measured.append((run.update, [str(data.images[place]) for place in range(len(data))]))
        return evaluate(model, task, data, *rest, **options)

    monkeypatch.setattr(loop, "evaluate", seen)
    resolved = recipe(**WATCHED, epochs=2, batch_size=6, ema={"decay": 0.5})
    run = trainer(resolved, images, tmp_path)
    trained = {str(run.train_data.images[place]) for place in range(len(run.train_data))}
    result = run.run()
    assert [update for update, _ in measured] == [3, 6, 6]  # two epochs are watched, then the test
    assert measured[0] == (3, measured[1][1])
    assert len(trained) == 18
    assert len(measured[0][1]) == 6
    assert not trained & set(measured[0][1])
    assert trained | set(measured[0][1]) == set(map(str, (images / "train").rglob("*.png")))
    assert set(measured[2][1]) == set(map(str, (images / "test").rglob("*.png")))
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["test"] == result["test"]
    assert written["last"] == result["last"]
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 2
    data = ImageFolder(str(images / "test"))
    pixels = torch.stack([(pil_to_tensor(image) / 255 - 0.5) / 0.5 for image, _ in data])
    with torch.no_grad():
        right = load_run(tmp_path)(pixels).argmax(dim=1) == torch.tensor(data.targets)
    assert result["test"]["top1"] == pytest.approx(100 * float(right.float().mean()), abs=1e-4)
    assert result["test"]["weights"] == "average"


def test_the_same_images_are_held_out_whatever_the_seed(images: Path) -> None:
    """A run that starts from another's weights must not watch what that was trained on."""
    sets = []
    for seed in (0, 1):
        kept, watched, test = open_data(recipe(**WATCHED, seed=seed).recipe, images)
        sets.append([[str(data.images[place]) for place in range(len(data))] for data in (kept, watched, test)])
    assert sets[0] == sets[1]
    for count in (4, 10, 1000):
        small, large = (set(hold_out(count, share)[1]) for share in (0.25, 0.5))
        assert small <= large
        assert len(large) == count // 2


@pytest.mark.parametrize(("count", "share", "left"), [(24, 0.01, "watch"), (24, 0.99, "train on"), (1, 0.5, "watch")])
def test_a_share_that_leaves_nothing(count: int, share: float, left: str) -> None:
    with pytest.raises(VitrimError, match=f"of {count} images leaves none to {left}"):
        hold_out(count, share)


def test_no_recipe_of_the_package_watches_test_images() -> None:
    """Only what is measured once, at the end, may be of the part that is reported."""
    for name in recipes():
        found = load_recipe(name).recipe
        assert found.eval_split != "test" or (found.eval_every is None and found.test_split is None), name
        assert found.eval_split != found.test_split or found.eval_split is None, name


def small() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2, num_classes=3)


def test_products_of_the_weights() -> None:
    """Value and projection near minus the identity, query and key near it, as far as the head's rank goes."""
    model = small()
    mimetic_(model)
    for block in model.blocks:
        attention = block.attn
        dim, head_dim = attention.qkv.in_features, attention.head_dim
        query, key, value = attention.qkv.weight.detach().double().split(dim)
        product = value.T @ attention.proj.weight.detach().double().T
        assert product.diagonal().mean() == pytest.approx(-0.4, abs=0.02)
        off_diagonal = product - product.diagonal().diag()
        assert off_diagonal.std() == pytest.approx(0.4 / dim**0.5, rel=0.05)
        for head in range(attention.num_heads):
            place = slice(head * head_dim, (head + 1) * head_dim)
            product = query[place].T @ key[place]
            assert torch.linalg.matrix_rank(product) == head_dim
            # the largest part of 0.7 (I + Z / sqrt(C)) has more than its share of the trace
            assert product.diagonal().mean() > 0.7 * head_dim / dim


def test_nothing_else_changes() -> None:
    torch.manual_seed(0)
    model = small()
    before = copy.deepcopy(model.state_dict())
    mimetic_(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    expected = {f"blocks.{depth}.attn.{name}.weight" for depth in range(2) for name in ("qkv", "proj")}
    assert changed == expected | {"pos_embed"}
    assert torch.equal(model.pos_embed[:, 0], before["pos_embed"][:, 0])  # the class token's


def test_other_models_are_refused() -> None:
    with pytest.raises(VitrimError, match=r"^init=mimetic sets one projection .*: this Linear does not have both"):
        mimetic_(nn.Linear(3, 2))
    with pytest.raises(VitrimError, match="this ViTForImageClassification does not have both"):
        mimetic_(tiny.HOSTS["hf_vit"]())
