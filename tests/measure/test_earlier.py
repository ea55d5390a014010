"""Keywords of the last release: each goes into the object that has it now, with a line, and changes nothing else."""

from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrim
from vitrim.errors import VitrimError
from vitrim.measure.earlier import earlier

COMMANDS = ("analyze", "bench", "compare", "evaluate", "export", "optimize", "profile", "show", "train", "tune")
FORMER = {
    "analyze": "more_models formats split image_column label_column data_options limit batch_size dtype workers "
    "pretrained checkpoint model_options device on_stop",
    "bench": "files compiled repeats min_seconds text_tokens prompt_images select new_tokens figure split image_column "
    "label_column pretrained checkpoint model_options device threads on_setting",
    "compare": "files batch_size repeats min_seconds limit task split image_column label_column data_options protocol "
    "workers figure pretrained checkpoint model_options device threads on_setting",
    "evaluate": "task split image_column label_column data_options limit protocol pretrained checkpoint model_options "
    "learned batch_size dtype workers device threads files resume decisions predictions on_stop",
    "export": "to batch opset precision preprocess size capacity split image_column label_column limit name classes "
    "pretrained checkpoint model_options threads",
    "optimize": "labels preprocess few_images resume limit split image_column label_column pretrained checkpoint "
    "model_options threads seed",
    "profile": "limit split image_column label_column text_tokens prompt_images new_tokens select pretrained "
    "checkpoint model_options threads",
    "show": "data split image_column label_column data_options limit format pretrained checkpoint model_options device "
    "threads",
    "train": "resume threads workers eval_batch save_minutes log_every tensorboard log_with max_updates",
    "tune": "front grid proxy shape minutes engine precision batch_size workers resume limit split image_column "
    "label_column data_options task pretrained checkpoint model_options device threads",
}


@dataclass(frozen=True)
class Images:
    """Stands for the images of a function."""

    source: Any
    limit: int | None = None


@dataclass(frozen=True)
class Place:
    """Stands for its results."""

    folder: Any = None
    resume: bool = False


@earlier(images=Images, out=Place)
def taking(
    model: Any, methods: Any = None, images: Any = None, *, out: Any = "here", target: Any = None
) -> dict[str, Any]:
    """A function that gives what it is given."""
    return {"model": model, "methods": methods, "images": images, "out": out, "target": target}


def test_no_function_of_a_command_has_more_than_ten_parameters() -> None:
    for name in (*COMMANDS, "tune_grid", "train_grid", "create_model", "open_data", "reduce_"):
        assert len(signature(getattr(vitrim, name)).parameters) <= 10, name


def test_a_call_without_former_keywords_is_passed_on_as_it_is(recwarn: pytest.WarningsRecorder) -> None:
    assert taking("m", "tome", "folder", target=1) == {
        "model": "m", "methods": "tome", "images": "folder", "out": "here", "target": 1,
    }  # fmt: skip
    assert not recwarn.list


def test_a_keyword_goes_into_the_object_that_has_it() -> None:
    with pytest.warns(DeprecationWarning, match=r"^limit is a field now, .*: images=Images\(..., limit=...\)$"):
        assert taking("m", images="folder", limit=3)["images"] == Images("folder", 3)
    with pytest.warns(DeprecationWarning, match="^resume is a field"):  # one that is there keeps what else it says
        assert taking("m", None, Images("folder", 5), resume=True) == {
            "model": "m", "methods": None, "images": Images("folder", 5), "out": Place("here", True), "target": None,
        }  # fmt: skip
    with pytest.warns(DeprecationWarning, match="^limit is a field"):
        assert taking("m", images=Images("folder", 5), limit=2)["images"] == Images("folder", 2)


def test_a_keyword_with_another_name_and_lists_that_stand_in_others() -> None:
    with pytest.warns(DeprecationWarning, match="^front is called target now"):
        assert taking("m", front="0.5")["target"] == "0.5"
    with pytest.warns(DeprecationWarning, match="^files are given among the methods"):
        assert taking("m", "tome", files=["a", "b"])["methods"] == ["tome", "a", "b"]
    with pytest.warns(DeprecationWarning, match="^files are given"):
        assert taking("m", files=["a"])["methods"] == ["a"]


def test_an_unknown_keyword_and_one_under_both_names_are_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'limits'"):
        taking("m", limits=3)
    told = pytest.warns(DeprecationWarning, match="^front is called target")
    with told, pytest.raises(VitrimError, match="front is called target now: give one of them"):
        taking("m", front="0.5", target="0.6")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_former_keyword_has_a_place(command: str) -> None:
    """The table is that of the last release; none may be an unknown keyword now."""
    function = getattr(vitrim, command)
    for name in FORMER[command].split():
        told = pytest.warns(DeprecationWarning, match="release")
        with told, pytest.raises((VitrimError, TypeError)) as refused:
            function(*[object()] * (2 if command in ("optimize", "profile", "train") else 3), **{name: object()})
        assert "unexpected keyword argument" not in str(refused.value), name


def test_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    with pytest.warns(DeprecationWarning, match="torch.set_num_threads"):
        taking("m", threads=3)
    assert seen == [3]


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
        (lambda: vitrim.Running(Path("a"), workers=-1), "workers is a whole number of at least 0, not -1"),
        (lambda: vitrim.Budget(min_rounds=0), "min_rounds must be at least 1, got 0"),
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
