"""The objects that refine arguments of the commands' functions, and what these functions refuse of them."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrim
from vitrim.errors import VitrimError

COMMANDS = ("analyze", "bench", "compare", "evaluate", "export", "optimize", "profile", "show", "train", "tune")


def test_no_function_of_a_command_has_more_than_ten_parameters() -> None:
    for name in (*COMMANDS, "tune_grid", "train_grid", "create_model", "open_data", "reduce_"):
        assert len(signature(getattr(vitrim, name)).parameters) <= 10, name


@pytest.mark.parametrize("kind", [vitrim.ModelSpec, vitrim.DataSpec, vitrim.Results], ids=lambda kind: kind.__name__)
def test_an_object_is_its_own_description(kind: Any) -> None:
    first = fields(kind)[0].name
    assert getattr(kind.of("a"), first) == "a"
    made = kind("a")
    assert kind.of(made) is made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vitrim.DataSpec("a", limit=0), "limit is a whole number of at least 1, not 0"),
        (lambda: vitrim.DataSpec("a", batch_size=0), "batch_size is a whole number of at least 1, not 0"),
        (lambda: vitrim.DataSpec("a", options=5), "data_options is a dict of options by name, not 5"),
        (lambda: vitrim.ModelSpec("a", options=5), "model_options is a dict of options by name, not 5"),
        (lambda: vitrim.Results(None, resume=True), "resume goes on from what a folder holds, and none is given"),
        (lambda: vitrim.Results(5), "out is a path, not 5"),
        (lambda: vitrim.Prompt(new_tokens=-1), "new_tokens is a whole number of at least 0, not -1"),
        (lambda: vitrim.Prompt(select="divprun:tokens=4"), "unknown selector 'divprun'; did you mean 'divprune'"),
        (lambda: vitrim.SearchSpec("grid"), "unknown search 'grid'"),
        (lambda: vitrim.SearchSpec(proxy="loss"), "unknown proxy 'loss'"),
        (lambda: vitrim.Running(Path("a"), workers=-1), "workers is a whole number of at least 0, not -1"),
        (lambda: vitrim.DataSpec("a", protocol="x"), "protocol is a dict of options by name, not 'x'"),
        (lambda: vitrim.ModelSpec("a", learned=5), "learned is a path, not 5"),
        (lambda: vitrim.Results("a", decisions=5), "decisions is a path, not 5"),
        (lambda: vitrim.Running(Path("a"), log_every=0), "log_every is a whole number of at least 1, not 0"),
        (lambda: vitrim.Running(Path("a"), max_updates=1.5), "max_updates is a whole number of at least 1, not 1.5"),
        (lambda: vitrim.Running(Path("a"), save_minutes="x"), "save_minutes is a number of at least 0, not 'x'"),
        (lambda: vitrim.Running(Path("a"), log_with=5), "log_with is a list of trackers, not 5"),
        (lambda: vitrim.Budget(min_rounds=0), "min_rounds must be at least 1, got 0"),
        (lambda: vitrim.Budget(min_rounds="a"), "min_rounds is a number, not 'a'"),
        (lambda: vitrim.DataSpec("a", limit="x"), "limit is a whole number of at least 1, not 'x'"),
        (lambda: vitrim.DataSpec("a", batch_size=2.5), "batch_size is a whole number of at least 1, not 2.5"),
        (lambda: vitrim.DataSpec("a", workers=-1), "workers is a whole number of at least 0, not -1"),
        (lambda: vitrim.DataSpec("a", split=5), "split is a text, not 5"),
        (lambda: vitrim.DataSpec("a", image_column=5), "image_column is a text, not 5"),
        (lambda: vitrim.DataSpec("a", label_column=5), "label_column is a text, not 5"),
        (lambda: vitrim.ModelSpec("a", checkpoint=5), "checkpoint is a path, not 5"),
        (lambda: vitrim.FileSpec(size="a"), "size is a whole number, or height and width, not 'a'"),
        (lambda: vitrim.FileSpec(size=(32,)), r"size is a whole number, or height and width, not \(32,\)"),
        (lambda: vitrim.FileSpec(size=(32, 32, 3)), r"size is a whole number, or height and width, not \(32, 32, 3\)"),
        (lambda: vitrim.FileSpec(classes=3), "classes are texts, the name of every class, not 3"),
        (lambda: vitrim.FileSpec(classes="abc"), "classes are texts, the name of every class, not 'abc'"),
        (lambda: vitrim.FileSpec(classes=[0, 1]), r"classes are texts, the name of every class, not \[0, 1\]"),
        (lambda: vitrim.FileSpec(name=3), "name is a text, not 3"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        make()


def test_one_description_of_several_models_holds_for_those_that_are_named() -> None:
    model = vitrim.create_model("test_vit", options={"depth": 1})
    named, given = vitrim.ModelSpec.each(vitrim.ModelSpec(["test_vit", model], options={"depth": 2}, dtype="bf16"))
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
    ("call", "message"),
    [
        (lambda: vitrim.bench(vitrim.ModelSpec("a", dtype="bf16"), "tome:r=1"), "dtype of ModelSpec has no effect"),
        (lambda: vitrim.bench("a", "tome:r=1", vitrim.DataSpec("b", limit=3)), "limit of DataSpec has no effect"),
        (lambda: vitrim.compare(vitrim.ModelSpec("a", learned="b"), "tome:r=1", "c"), "learned of ModelSpec"),
        (lambda: vitrim.evaluate("a", None, vitrim.DataSpec("b", labels=False)), "labels of DataSpec"),
        (lambda: vitrim.evaluate("a", None, "b", out=vitrim.Results("c", preprocess=True)), "preprocess of Results"),
        (lambda: vitrim.profile(vitrim.ModelSpec("a", device="cuda")), "device of ModelSpec"),
        (lambda: vitrim.export(vitrim.ModelSpec("a", device="cuda"), None, "b.onnx"), "device of ModelSpec"),
        (lambda: vitrim.show("a", "tome:r=1", "b", out=vitrim.Results("c", resume=True)), "resume of Results"),
        (lambda: vitrim.tune("a", "tome", vitrim.DataSpec("b", few=True), target="macs=0.5"), "few of DataSpec"),
        (lambda: vitrim.optimize("a", vitrim.DataSpec("b", workers=2)), "workers of DataSpec"),
        (lambda: vitrim.analyze("a", (), "b", out=vitrim.Results("c", resume=True)), "resume of Results"),
    ],
)
def test_what_a_function_does_not_read_is_refused(call: Any, message: str) -> None:
    with pytest.raises(VitrimError, match=f"^{message}.*: leave it out; read are "):
        call()
