"""The objects that refine arguments of the commands' functions, and what these functions refuse of them."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrim
from vitrim.errors import VitrimError

COMMANDS = (
    "analyze",
    "bench",
    "compare",
    "evaluate",
    "export",
    "freeze",
    "optimize",
    "profile",
    "show",
    "train",
    "tune",
)


def test_no_function_of_a_command_has_more_than_ten_parameters() -> None:
    for name in (*COMMANDS, "tune_grid", "train_grid", "create_model", "open_data", "reduce_"):
        assert len(signature(getattr(vitrim, name)).parameters) <= 10, name


@pytest.mark.parametrize("kind", [vitrim.ModelSpec, vitrim.DataSpec, vitrim.Results], ids=lambda kind: kind.__name__)
def test_an_object_is_its_own_description(kind: Any) -> None:
    first = fields(kind)[0].name
    assert getattr(kind.of("a"), first) == "a"
    made = kind("a")
    assert kind.of(made) is made


def test_an_object_with_fewer_fields_is_completed_and_one_with_more_is_refused() -> None:
    assert vitrim.ScoredData.of(vitrim.DataSpec("a", limit=3)) == vitrim.ScoredData("a", limit=3, batch_size=32)
    with pytest.raises(VitrimError, match=r"^ScoredData has batch_size, protocol, .* reads here: give a DataSpec"):
        vitrim.DataSpec.of(vitrim.ScoredData("a"))


@pytest.mark.parametrize(
    ("make", "field", "wanted"),
    [
        (lambda: vitrim.DataSpec("a", limit=0), "limit=0", "at least 1"),
        (lambda: vitrim.DataSpec("a", limit="3"), "limit=3", "a whole number"),
        (lambda: vitrim.DataSpec("a", limit=True), "limit=true", "a whole number"),
        (lambda: vitrim.DataSpec("a", split=5), "split=5", "a text"),
        (lambda: vitrim.DataSpec("a", few=True), "unknown option of DataSpec 'few'", "it is one of JudgedData$"),
        (lambda: vitrim.ModelSpec("a", device="cpu"), "'device'", "it is one of PlacedModel and ScoredModel$"),
        (lambda: vitrim.DataSpec("a", options=5), "options=5", "options by name"),
        (lambda: vitrim.ModelSpec("a", checkpoint=5), "checkpoint=5", "a text, or a path"),
        (lambda: vitrim.ScoredModel("a", learned=5), "learned=5", "a text, or a path"),
        (lambda: vitrim.ScoredData("a", batch_size=2.5), "batch_size=2.5", "a whole number"),
        (lambda: vitrim.Results(None, resume=True), "resume", "give out"),
        (lambda: vitrim.Pictures("a", ["pdf"]), "formats=pdf", "'png' or 'svg'"),
        (lambda: vitrim.Prompt(new_tokens=-1), "new_tokens=-1", "at least 0"),
        (lambda: vitrim.Prompt(select="divprun:tokens=4"), "unknown selector 'divprun'", "did you mean 'divprune'"),
        (lambda: vitrim.SearchSpec(proxy="loss"), "proxy=loss", "'feature'"),
        (lambda: vitrim.SearchSpec(minutes=0), "minutes=0", "above 0"),
        (lambda: vitrim.Running(Path("a"), save_minutes="x"), "save_minutes=x", "a number"),
        (lambda: vitrim.Running(Path("a"), log_with=5), "log_with=5", "a list"),
        (lambda: vitrim.Budget(min_rounds=7, max_rounds=6), "max_rounds", "at least min_rounds"),
        (lambda: vitrim.Budget(min_seconds=float("nan")), "min_seconds=nan", "at least 0"),
        (lambda: vitrim.FileSpec(size=(32, 0)), "size=0", "at least 1"),
        (lambda: vitrim.FileSpec(size=(32, 32, 3)), r"size=\[32,32,3\]", "at most 2 entries"),
        (lambda: vitrim.FileSpec(classes="abc"), "classes=abc", "a list"),
        (lambda: vitrim.FileSpec(opset=99), "opset=99", "below "),
        (lambda: vitrim.evaluate("a", 3, "b"), "methods=3", "or a text, or an Exported, or a list in brackets$"),
        (
            lambda: vitrim.FileSpec(presision="int8"),
            "unknown option of FileSpec 'presision'",
            "did you mean 'precision'",
        ),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_written(make: Any, field: str, wanted: str) -> None:
    with pytest.raises(VitrimError, match=f"{field}.*{wanted}"):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vitrim.profile("a", batch_size=0), "profile: batch_size=0: must be at least 1"),
        (lambda: vitrim.profile("a", convention="no-mlp"), "convention=no-mlp: must be 'all'"),
        (lambda: vitrim.profile(5), "models=5: must be a torch.nn.Module, or a text"),
        (lambda: vitrim.evaluate("a", None, "b", on_progress=3), "on_progress=3: must be a function"),
        (lambda: vitrim.evaluate("a", None, "b", seed=-1), "seed=-1: must be at least 0"),
        (lambda: vitrim.export("a", None, "b.onnx", "int8"), "file=int8: must be a FileSpec"),
        (lambda: vitrim.show("a", "tome:r=1", "b", blocks=[-1]), "blocks=-1: must be at least 0"),
        (lambda: vitrim.bench("a", budjet=3), "unknown option of bench 'budjet'; did you mean 'budget'"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_loaded(call: Any, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        call()


def test_one_description_of_several_models_holds_for_those_that_are_named() -> None:
    model = vitrim.create_model("test_vit", options={"depth": 1})
    named, given = vitrim.ScoredModel.each(vitrim.ScoredModel(["test_vit", model], options={"depth": 2}, dtype="bf16"))
    assert (named.model, named.options, named.dtype) == ("test_vit", {"depth": 2}, "bf16")
    assert given.model is model
    assert (given.options, given.dtype) == (None, "bf16")
    with pytest.raises(VitrimError, match="name at least one model"):
        vitrim.ModelSpec.each([])
    with pytest.raises(VitrimError, match="a checkpoint holds the weights of one model"):
        vitrim.ModelSpec.each(vitrim.ModelSpec(["a", "b"], checkpoint="weights.safetensors"))


def test_random_weights_of_a_description_follow_from_its_seed() -> None:
    before = torch.get_rng_state()
    one, again, other = (vitrim.ModelSpec("test_vit", seed=seed).load().model.pos_embed for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("call", "unread"),
    [
        (lambda: vitrim.bench(vitrim.ScoredModel("a"), "tome:r=1"), "dtype"),
        (lambda: vitrim.bench("a", "tome:r=1", vitrim.ScoredData("b")), "task"),
        (lambda: vitrim.compare(vitrim.ScoredModel("a"), "tome:r=1", "c"), "dtype"),
        (lambda: vitrim.evaluate("a", None, vitrim.JudgedData("b")), "labels"),
        (lambda: vitrim.evaluate("a", None, "b", out=vitrim.FileResults("c")), "preprocess"),
        (lambda: vitrim.profile(vitrim.PlacedModel("a")), "device"),
        (lambda: vitrim.profile(["a", vitrim.PlacedModel("a")]), "device"),
        (lambda: vitrim.export(vitrim.PlacedModel("a"), None, "b.onnx"), "device"),
        (lambda: vitrim.show("a", "tome:r=1", "b", out=vitrim.Results("c")), "resume"),
        (lambda: vitrim.tune("a", "tome", vitrim.JudgedData("b"), target="macs=0.5"), "labels"),
        (lambda: vitrim.optimize("a", vitrim.ScoredData("b")), "task"),
        (lambda: vitrim.analyze("a", (), "b", out=vitrim.Results("c")), "resume"),
    ],
)
def test_an_object_with_fields_that_a_function_does_not_read_is_refused(call: Any, unread: str) -> None:
    words = rf" has .*\b{unread}\b.*, which nothing reads here|must be .*a Pictures|must be .*a \w*Results"
    with pytest.raises(VitrimError, match=words):
        call()
