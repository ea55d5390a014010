"""Jobs of the page: every method that needs no training shows its pictures, numbers are those of the other commands,
nothing of one user reaches another."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrim
from app_files import EXAMPLES as FOLDER
from app_files import MODEL
from full_matrix import cells
from vitrim.app import service as service_file
from vitrim.app.messages import ModelSource, Settings
from vitrim.app.page import html
from vitrim.app.photographs import EXAMPLES
from vitrim.app.service import KEPT_MODELS, ROUNDS, Service, _reduced
from vitrim.app.sliders import config_of, slide_of
from vitrim.core.reduce import HANDLE
from vitrim.core.registry import methods
from vitrim.data.transforms import eval_transform
from vitrim.engines.macs import profile_of
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.tasks.classes import class_names

FREE = [name for name, kind in methods().items() if kind.traits.training_free and kind.tunable is not None]


def another(service: Service, seconds: float) -> Service:
    """One that has the models of the first, which take their time to be loaded and looked at."""
    found = Service(list(service.sources.values()), seconds=seconds)
    found.loaded.update(service.loaded)
    return found


def test_every_method_that_needs_no_training_is_on_offer(service: Service) -> None:
    offer = service.offer(MODEL)
    assert list(offer.slides) == FREE
    assert len(FREE) >= 18
    for slide in offer.slides.values():
        assert slide.minimum <= slide.value <= slide.maximum
        assert not slide.label.startswith("(")
        assert len(slide.label) < 70


SHOWN = ("topk", "l2", "random", "evit", "ats", "tome", "mctf", "atm", "gtp", "dpc_knn")
"""Others differ from one of these in a score alone, or in which pairs they merge or drop."""


@pytest.mark.parametrize("method", FREE)
def test_a_slider_begins_where_something_is_removed(method: str) -> None:
    """At a value that it can take: a share of the patches is a whole number of them on it."""
    slide, tunable = slide_of(method, patches=64), methods()[method].tunable
    assert slide.minimum <= slide.value <= slide.maximum
    assert getattr(config_of(method, slide.value), tunable.option) == slide.value != tunable.mildest


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", cells(FREE, SHOWN))
def test_every_method_shows_its_pictures(method: str, service: Service, ship: bytes) -> None:
    slide = service.offer(MODEL).slides[method]
    result = service.run(ship, Settings(MODEL, method, slide.value))
    (reduced,) = result.reduced
    assert len(reduced.pictures) == 6
    pixels = [np.asarray(Image.open(io.BytesIO(one.webp))) for one in (result.image, *reduced.pictures)]
    assert all(one.shape == (224, 224, 3) for one in pixels)
    assert any(not np.array_equal(pixels[0], one) for one in pixels), "nothing was drawn"
    assert "pruned" in reduced.pictures[-1].words or "merged" in reduced.pictures[-1].words
    assert reduced.method.startswith(method)
    assert reduced.side.gmacs < result.dense.gmacs
    assert reduced.saved == pytest.approx(1 - reduced.side.gmacs / result.dense.gmacs)
    assert result.dense.best[0][0] == "ship"
    assert sum(share for _, share in reduced.side.best) <= 1 + 1e-9
    assert reduced.same is (reduced.side.best[0][0] == "ship")
    assert reduced.timing is not None
    median, q1, q3 = reduced.timing.speedup
    assert min(reduced.timing.dense_ms, reduced.timing.reduced_ms) > 0.0
    assert 0 < q1 <= median <= q3


@pytest.mark.slow
def test_methods_stand_side_by_side_at_the_same_macs(service: Service, ship: bytes) -> None:
    """Each alone at the setting that is shown gives what is shown beside the first; all are timed against one dense."""
    result = service.run(ship, Settings(MODEL, "tome", 8, beside=("topk", "tome", "atm", "topk")))
    first, topk, atm = result.reduced
    assert [one.name for one in result.reduced] == ["tome", "topk", "atm"]
    for one in (topk, atm):
        assert one.saved == pytest.approx(first.saved, abs=0.03)
        assert one.timing is not None
    alone = service.run(ship, Settings(MODEL, "topk", float(topk.method.rpartition("=")[2]))).reduced[0]
    assert (alone.method, alone.side, alone.pictures) == (topk.method, topk.side, topk.pictures)


@pytest.mark.slow
def test_numbers_are_those_of_the_other_commands(service: Service, ship: bytes) -> None:
    """MACs and tokens of `vitrim profile`, and the probability that the reduced model itself gives."""
    result = service.run(ship, Settings(MODEL, "tome", 9))
    model = create_model(MODEL)
    image = eval_transform(model)(Image.open(FOLDER / "ship.png"))
    known = profile_of(model, "tome:r=9", image[None])
    (reduced,) = result.reduced
    assert reduced.side.gmacs == pytest.approx(known.macs.total / 1e9, rel=1e-6)
    assert tuple(reduced.side.tokens) == known.tokens_per_block
    vitrim.reduce_(model, "tome:r=9")
    with torch.no_grad():
        share = model(image[None]).softmax(-1)[0, 8].item()
    assert dict(reduced.side.best)["ship"] == pytest.approx(share, rel=1e-4)


def test_pictures_and_numbers_are_of_one_draw() -> None:
    """Those of a model that is reduced here, under the same seed."""
    model, method = create_model(MODEL), "random:keep_rate=0.5"
    image = eval_transform(model)(Image.open(FOLDER / "ship.png"))[None]
    shown, sources = _reduced(model, vitrim.parse_method(method), image)
    reduction = vitrim.reduce_(model, method, record=True)
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(image)
    torch.testing.assert_close(shown.prediction, logits)
    expected = [state.source[0, state.num_prefix :].tolist() for state in reduction.states[1:]]
    assert sources.tolist() == expected


def test_a_model_is_shown_what_it_knows(service: Service) -> None:
    """Photographs come first, and everything on offer is what the model takes it for."""
    model = create_model(MODEL)
    names, known = class_names(model.class_names, model.num_classes) or [], service.offer(MODEL).examples
    files = {one.name: one for one in EXAMPLES}
    images = torch.stack([eval_transform(model)(Image.open(files[name].path).convert("RGB")) for name in known])
    said = [names[place] for place in model(images).argmax(-1).tolist()]
    assert all(name in files[known[place]].classes for place, name in enumerate(said))
    assert files[known[0]].credit, "a photograph"
    assert len(known) >= 6


@pytest.mark.slow
def test_a_model_that_knows_nothing_is_shown_photographs() -> None:
    known = Service([ModelSource("test_vit")]).offer("test_vit").examples
    assert known == [one.name for one in EXAMPLES if one.credit]


def test_every_example_has_its_file_and_every_file_is_named() -> None:
    folder = EXAMPLES[0].path.parent
    listed = (folder / "README.md").read_text(encoding="utf-8")
    assert {one.path for one in EXAMPLES} == {*folder.glob("*.png"), *folder.glob("*.jpg")}
    assert all(f"`{one.path.name}`" in listed for one in EXAMPLES if one.credit)


@pytest.mark.parametrize("method", FREE)
def test_a_slider_stands_between_its_ends_on_small_models_too(method: str) -> None:
    slide = slide_of(method, patches=4)
    assert slide.minimum <= slide.value <= slide.maximum


def test_a_slider_at_its_mild_end_changes_nothing(service: Service, ship: bytes) -> None:
    result = service.run(ship, Settings(MODEL, "topk", 1.0))
    (reduced,) = result.reduced
    assert reduced.same
    assert reduced.side.gmacs == pytest.approx(result.dense.gmacs)
    assert reduced.pictures[-1].words == "after block 5: all 64 patches are there"


@pytest.mark.slow
def test_what_a_reduction_cannot_do_is_noted(service: Service, ship: bytes) -> None:
    """Ten blocks of 32 patches cannot lose 32 in each."""
    notes = service.run(ship, Settings(MODEL, "tome", 32)).notes
    assert any("tome" in note or "removes" in note or "fewer" in note for note in notes), notes


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Settings("deit_small_patch16_224", "tome", 8), "unknown model 'deit_small_patch16_224'"),
        (Settings("run:/etc", "tome", 8), "unknown model 'run:/etc'"),
        (Settings(MODEL, "tomme", 8), "unknown method 'tomme'; did you mean 'tome'?"),
        (Settings(MODEL, "@/etc/passwd", 8), "unknown method '@/etc/passwd'"),
        (Settings(MODEL, "dynamicvit", 0.5), "unknown method 'dynamicvit'"),
        (Settings(MODEL, "tome", -1), "r=-1: must be at least 0"),
        (Settings(MODEL, "topk", 7.0), "keep_rate=7"),
        (Settings(MODEL, "tome", float("nan")), "r=nan is no number"),
        (Settings(MODEL, "tome", "8"), "r=8 is no number"),  # type: ignore[arg-type]
        (Settings(MODEL, "tome", 8, "r=9"), "'r' is given twice"),
        (Settings(MODEL, "tome", 8, "q=9"), "unknown option of tome 'q'"),
        (Settings(MODEL, "tome", 8, "nonsense"), "cannot read 'nonsense'"),
        (Settings(MODEL, "tome", 8, "inflect=" + "9" * 400), "at most 300 are read"),
        (Settings(MODEL, "tome", 8, "@/etc/passwd"), "cannot read '@/etc/passwd'"),
    ],
)
def test_choices_that_are_not_on_offer(choice: Settings, message: str, service: Service, ship: bytes) -> None:
    with pytest.raises(VitrimError) as error:
        service.run(ship, choice)
    assert message in str(error.value)


@pytest.mark.slow
def test_users_share_nothing_but_weights(service: Service, ship: bytes) -> None:
    """Jobs in turn are what they are alone, and the model is as it was."""
    before = {name: weight.clone() for name, weight in service._load(MODEL).model.state_dict().items()}
    choices = [Settings(MODEL, "tome", 9), Settings(MODEL, "random", 0.4)]
    first, second, again, second_again = (service.run(ship, choices[place]) for place in (0, 1, 0, 1))
    for one, other in ((first, again), (second, second_again)):
        for name in ("method", "side", "pictures"):
            assert getattr(one.reduced[0], name) == getattr(other.reduced[0], name)
    assert first.reduced[0].pictures != second.reduced[0].pictures
    model = service._load(MODEL).model
    assert not hasattr(model, HANDLE)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.slow  # loads five models
def test_few_models_stay_loaded_and_one_that_comes_back_is_the_same_one() -> None:
    names = ["test_vit", "test_vit2", "test_vit3", "test_vit4"]
    service = Service([ModelSource(name) for name in names])
    for name in names[:3]:
        service.offer(name)
    first = service.loaded[names[0]]
    weights = {name: value.clone() for name, value in service.loaded[names[1]].model.state_dict().items()}
    service.offer(names[0])
    service.offer(names[3])
    assert len(service.loaded) == KEPT_MODELS
    assert service.loaded[names[0]] is first, "the one that was used longest ago goes"
    assert names[1] not in service.loaded
    service.offer(names[1])
    again = service.loaded[names[1]].model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_what_would_take_too_long_is_left_out_and_noted(service: Service, ship: bytes) -> None:
    service.offer(MODEL)
    result = another(service, seconds=1e-6).run(ship, Settings(MODEL, "tome", 8, beside=("topk",)))
    (reduced,) = result.reduced
    assert reduced.timing is None
    assert any("too long to be timed" in note for note in result.notes)
    assert any("too long for several methods" in note for note in result.notes)


@pytest.mark.parametrize(("share", "timed"), [(0.5, True), (1.5, False)])
def test_timing_takes_what_is_left_of_the_time(
    share: float, timed: bool, service: Service, ship: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four models, each once before and ROUNDS times: a forward that takes so long that this is half, or too much."""
    service.offer(MODEL)
    known = another(service, seconds=1000.0)
    seconds = share * known.seconds / (4 * (ROUNDS + 1))
    dense = service_file._dense
    monkeypatch.setattr(service_file, "_dense", lambda *given: (dense(*given)[0], seconds))
    monkeypatch.setattr(service_file, "_timings", lambda *_: ["timed"])
    result = known.run(ship, Settings(MODEL, "tome", 8))
    assert (result.reduced[0].timing == "timed") is timed


@pytest.mark.slow
@pytest.mark.parametrize("reduced_class", [0, 3])
def test_whether_the_answer_is_the_same(
    reduced_class: int, service: Service, ship: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.eye(10)
    dense, reduced = service_file._dense, service_file._reduced
    monkeypatch.setattr(service_file, "_dense", lambda *given: (replace(dense(*given)[0], prediction=logits[:1]), 1e9))
    monkeypatch.setattr(
        service_file,
        "_reduced",
        lambda *given: (replace(reduced(*given)[0], prediction=logits[reduced_class][None]), reduced(*given)[1]),
    )
    result = service.run(ship, Settings(MODEL, "tome", 8))
    assert result.reduced[0].same is (reduced_class == 0)
    names = ["airplane", "automobile", "bird", "cat"]
    assert (result.dense.best[0][0], result.reduced[0].side.best[0][0]) == (names[0], names[reduced_class])


@pytest.mark.parametrize(
    ("name", "message"),
    [("resnet18", "its layers are convolutions"), ("segmenter:test_vit", "only classifiers are shown")],
)
def test_models_that_cannot_be_shown(name: str, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        Service([ModelSource(name)]).offer(name)


def test_a_tower_is_shown_by_its_nearest_examples_and_the_cosine_to_dense() -> None:
    options = {"img_size": 64, "num_classes": 0}
    service = Service([ModelSource("test_vit", options=options)])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = create_model("test_vit", options=options).eval()
    transform, content = eval_transform(model), EXAMPLES[1].path.read_bytes()
    images = torch.stack([transform(Image.open(one.path).convert("RGB")) for one in EXAMPLES])
    with torch.no_grad():
        gallery = model(images)
    with vitrim.reduced(model, "tome:r=2"), torch.no_grad():
        own = model(images[1:2])
    assert service.offer("test_vit").examples[0] == EXAMPLES[0].name
    result = service.run(content, Settings("test_vit", "tome", 2))
    (reduced,) = result.reduced
    assert result.embeds
    assert reduced.method == "tome:r=2"
    assert (result.dense.best[0][0], reduced.cosine) == (
        EXAMPLES[1].name,
        pytest.approx(torch.cosine_similarity(own, gallery[1:2]).item(), abs=1e-6),
    )
    cosines = torch.cosine_similarity(own, gallery, dim=1)
    wanted = [(EXAMPLES[place].name, cosines[place].item()) for place in cosines.argsort(descending=True)[:5].tolist()]
    assert [name for name, _ in reduced.side.best] == [name for name, _ in wanted]
    assert [value for _, value in reduced.side.best] == pytest.approx([value for _, value in wanted], abs=1e-6)
    assert reduced.same is (wanted[0][0] == EXAMPLES[1].name)
    shown = html("result", result=result, block=0)
    assert f"Cosine of the embedding to the dense one: <b>{reduced.cosine:.3f}</b>" in shown
    assert '<th scope="col">example</th><th scope="col">cosine</th>' in shown
