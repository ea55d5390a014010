"""The measurements of `vitrim optimize` on tensors: which images each one reads, against plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tiny
import vitrim
from vitrim.core.image_size import at_size
from vitrim.core.registry import parse_method
from vitrim.engines.engine import Engine
from vitrim.engines.runnable import Module, Runnable
from vitrim.engines.static import frozen
from vitrim.measure.probes import PairedLoss
from vitrim.measure.store import Store
from vitrim.tasks import make_task
from vitrim.tuning import optimize_race as racing
from vitrim.tuning.optimize_race import Candidate, Race, Setting
from vitrim.tuning.proxy import DatasetImages, Third
from vitrim.tuning.space import quiet

COUNT = 33
METHOD = "topk:keep_rate=0.4,blocks=[0]"


class Doubling(Engine):
    """An engine that computes on twice the image, as one that rounds would change it; and keeps what it is given."""

    label = "doubling"

    def __init__(self) -> None:
        super().__init__("fp32")
        self.prepared: list[tuple[Tensor, Tensor | None]] = []

    def check(self, device: torch.device) -> None:
        pass

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        self.prepared.append((images, calibration))
        return Module(model, self.label, batch=len(images), call=lambda given: model(2 * given))


def model() -> Any:
    found: Any = tiny.HOSTS["vit"]()
    tiny.drop_last_block(found)
    tiny.drop_last_block(found)
    return found


@pytest.fixture
def dataset() -> TensorDataset:
    labels = torch.randint(5, (COUNT,), generator=torch.Generator().manual_seed(2))
    return TensorDataset(tiny.images(COUNT), labels)


@pytest.fixture
def race(dataset: TensorDataset, tmp_path: Path) -> Race:
    task = make_task("classification", 5)
    images = DatasetImages(dataset, COUNT // 3, racing.SEARCHED_AT)
    loss = PairedLoss(task, labels=True)
    return Race(model(), task, loss, images, [Doubling()], 4, Store(None), tmp_path, lambda text: None)


def expected(dataset: TensorDataset, places: list[int], run: Any) -> dict[str, Any]:
    """Loss and divergence of a model against the dense one on these images, written down."""
    images, labels = (each[places] for each in dataset.tensors)
    with torch.no_grad():
        dense, found = model()(images), run(images)
    lost = (dense.argmax(1) == labels).double() - (found.argmax(1) == labels).double()
    kl = F.kl_div(found.double().log_softmax(1), dense.double().log_softmax(1), log_target=True, reduction="batchmean")
    error = max(float(lost.std(unbiased=False)) / len(places) ** 0.5, 1 / len(places))
    return {
        "loss": pytest.approx(float(lost.mean())),
        "loss_error": pytest.approx(error),
        "kl": pytest.approx(float(kl)),
    }


def reduced() -> Any:
    found = model()
    vitrim.reduce_(found, METHOD)
    return found


def test_methods_race_on_the_first_third_alone(dataset: TensorDataset, race: Race) -> None:
    """Those of the second third choose, and those of the last one check: neither may be seen here."""
    search = list(range(0, COUNT, 3))
    (found,) = race.losses([Setting(parse_method(METHOD))])
    assert found == expected(dataset, search, reduced())
    (each,) = race.evaluator.piece([parse_method(METHOD)], "search", 0, 5)
    assert each["kl"].mean() == expected(dataset, search[:5], reduced())["kl"]


@pytest.mark.parametrize(("part", "first"), [("search", 0), ("selection", 1), ("check", 2)])
def test_files_are_scored_on_the_third_that_is_asked_for(
    part: Third, first: int, dataset: TensorDataset, race: Race
) -> None:
    places = list(range(first, COUNT, 3))
    engine = race.engines[0]
    one, other = (Candidate(Setting(config), engine, {}) for config in (parse_method(METHOD), None))
    scores = race.file_losses([one, other], part)
    assert [score.pop("images") for score in scores] == [len(places)] * 2
    for score, run in zip(scores, (reduced(), model()), strict=True):
        assert score == expected(dataset, places, lambda images, run=run: run(2 * images))


def test_files_are_made_with_images_of_the_first_third(dataset: TensorDataset, race: Race) -> None:
    race.ready(Setting(), race.engines[0])
    ((images, calibration),) = race.engines[0].prepared  # type: ignore[attr-defined]
    assert torch.equal(calibration, dataset.tensors[0][::3])
    assert torch.equal(images, dataset.tensors[0][[0, 3, 6, 9]])


def test_speedups_are_of_the_first_file_over_each(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which the second file takes half as long, and the third twice."""
    ms = {"0": [4.0] * 15, "1": [2.0] * 15, "2": [8.0] * 15}
    monkeypatch.setattr(racing, "time_interleaved", lambda calls, **_: {name: ms[name] for name in calls})
    pairs = [
        (Setting(), Doubling()),
        *((Setting(parse_method(one)), Doubling()) for one in (METHOD, "topk:keep_rate=0.9")),
    ]
    rows = race.times(pairs, "files")
    assert [(row["p50_ms"], row["speedup"]) for row in rows] == [(4.0, 1.0), (2.0, 2.0), (8.0, 0.5)]


class Sized(torch.utils.data.Dataset[Any]):
    """The images, also as a smaller model takes them: every second pixel."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> Any:
        image, label = self.data[place]
        return {None: image, 12: image[:, ::2, ::2]}, label


def test_a_smaller_model_gets_the_same_images_in_its_size(dataset: TensorDataset, race: Race) -> None:
    """Against the dense model at its own size, in PyTorch and as a file; files are made with the smaller images."""
    smaller = at_size(model(), 12)
    race.others = {12: smaller}
    race.images_at = lambda sizes: DatasetImages(Sized(dataset), COUNT // 3, racing.SEARCHED_AT)
    places = list(range(0, COUNT, 3))

    def run(images: Tensor) -> Tensor:
        return smaller(images[:, :, ::2, ::2])  # type: ignore[no-any-return]

    scored, whole = race.losses([Setting(None, 12), Setting(parse_method(METHOD))])
    assert scored == expected(dataset, places, run)
    assert whole == expected(dataset, places, reduced())
    (file,) = race.file_losses([Candidate(Setting(None, 12), race.engines[0], {})], "search")
    assert file == {**expected(dataset, places, lambda images: run(2 * images)), "images": len(places)}
    ((images, calibration),) = race.engines[0].prepared  # type: ignore[attr-defined]
    assert torch.equal(calibration, dataset.tensors[0][::3, :, ::2, ::2])
    assert images.shape[-2:] == (12, 12)
    assert race.macs(12) < race.macs(None)


def test_adaptive_methods_race_by_their_schedules(race: Race) -> None:
    """Frozen on images of the first third, at the share that is asked for."""
    (one, *_) = race.schedules([parse_method("saint")])
    config = one.at(0.8)
    assert config is not None
    assert not config.is_adaptive()
    assert one.cost.share(config) <= 0.8
    images = race._some(racing.COUNTED)
    adaptive = next(text for text, found in one.cost._settled.items() if found == config)
    assert frozen(race.model, adaptive, [images]) == config


def test_counts_are_multiples_of_16_where_there_are_many(race: Race) -> None:
    """Of 144 patches and a class token, in every method that can round its counts, and at most at the share."""
    large = VisionTransformer(img_size=48, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=5).eval()
    images = DatasetImages(TensorDataset(torch.zeros(6, 3, 48, 48), torch.zeros(6)), 2, racing.SEARCHED_AT)
    race.model, race.images = large, images
    for text in ("tome", "topk"):
        with quiet():
            (one, *_) = race.schedules([parse_method(text)])
            config = one.at(0.8)
        assert config is not None
        counts = config.counts(144, 3) or []
        assert min(counts) < 144
        assert all((count + 1) % 16 == 0 for count in counts if count < 144)
        assert one.cost.share(config) <= 0.8
