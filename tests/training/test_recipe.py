"""Recipes are read, merged, changed and refused as they should be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitrim.errors import VitrimError
from vitrim.training.recipe import COMMAND_LINE, DEFAULT, Recipe, load_recipe, recipes, resolve

MINIMAL = {"model": "test_vit", "epochs": 1}


@pytest.fixture
def write(tmp_path: Path):
    """Writes a recipe file of that name and gives its path."""

    def to(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to


def message(call, *arguments: object) -> str:
    """The one line a call is refused with."""
    with pytest.raises(VitrimError) as refused:
        call(*arguments)
    return str(refused.value)


# ---- bases and where values are from ---------------------------------------------------------------------------------


def test_a_recipe_gives_only_what_differs_from_its_base(write) -> None:
    write("a", "model: test_vit\nepochs: 10\noptimizer: {lr: 0.5, weight_decay: 0.25}\nramps:\n"
               "  - {option: r, start: 0, stop: 8, end_epoch: 2}\nobjective: {x: 1}")  # fmt: skip
    write("b", "base: a\nepochs: 20\noptimizer: {lr: 0.125}\nobjective: {y: 2}")
    resolved = load_recipe(write("c", "base: b\nramps: []\nschedule: {warmup_epochs: 3}"), ["optimizer.clip=1"])
    recipe = resolved.recipe
    assert (recipe.model, recipe.epochs, recipe.ramps, recipe.objective) == ("test_vit", 20, (), {"x": 1, "y": 2})
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.optimizer.clip) == (0.125, 0.25, 1)
    origin = {name: where for name, _, where in resolved.rows()}
    expected = {
        "model": "a", "epochs": "b", "optimizer.lr": "b", "optimizer.weight_decay": "a", "optimizer.clip": COMMAND_LINE,
        "schedule.warmup_epochs": "c", "schedule.min_lr": DEFAULT, "ramps": "c", "objective.x": "a", "objective.y": "b",
    }  # fmt: skip
    assert {name: origin[name] for name in expected} == expected


def test_rows_name_every_value_once() -> None:
    rows = list(resolve(MINIMAL).rows())
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names))
    assert {"optimizer.betas", "augment.scale", "model_options", "ema", "seed"} <= set(names)
    assert {where for _, _, where in rows} == {DEFAULT}


def test_a_base_may_be_a_recipe_of_the_package(write) -> None:
    resolved = load_recipe(write("mine", "base: deit_small\nepochs: 5"))
    assert (resolved.name, resolved.recipe.epochs, resolved.recipe.model) == ("mine", 5, "deit_small_patch16_224")
    assert resolved.origin["model"] == "deit_small"


def test_a_base_may_be_a_recipe_of_the_study(write) -> None:
    resolved = load_recipe(write("mine", "base: study/nabirds/topk@90\nepochs: 5"), ["seed=1"])
    origin = resolved.origin
    assert (resolved.name, resolved.recipe.epochs, resolved.recipe.method) == ("mine", 5, "topk:keep_rate=0.9")
    assert (origin["method"], origin["mix.mixup"], origin["augment.hflip"]) == (
        "study/nabirds/topk@90", "study/nabirds", "study/imagenet",
    )  # fmt: skip
    assert "base is the name of a recipe" in message(load_recipe, write("mine", "base: study/nabirds/topk"))


def test_a_file_beside_comes_before_one_of_the_package(write) -> None:
    write("deit_small", "model: test_vit\nepochs: 7")
    assert load_recipe(write("mine", "base: deit_small")).recipe.model == "test_vit"


def test_a_section_can_be_taken_away_and_put_back(write) -> None:
    write("a", "model: test_vit\nepochs: 1\nema: {decay: 0.5, warmup: true}")
    write("b", "base: a\nema: null")
    assert load_recipe(write("c", "base: b")).recipe.ema is None
    ema = load_recipe(write("d", "base: b\nema: {decay: 0.75}")).recipe.ema
    assert ema is not None
    assert (ema.decay, ema.warmup) == (0.75, False)


@pytest.mark.parametrize("ring", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_recipe_that_is_its_own_base(write, ring: list[str]) -> None:
    for name, base in zip(ring, [*ring[1:], ring[0]], strict=True):
        path = write(name, f"base: {base}\nmodel: test_vit\nepochs: 1")
    text = message(load_recipe, path)
    assert "its own base" in text
    assert all(name in text for name in ring)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": {"weight_decy": 0}}, "unknown option of optimizer 'weight_decy'; did you mean 'weight_decay'?"),
        ({"ramps": [{"option": "r", "start": 0, "stop": 1, "end_epoch": 1, "shap": "step"}]}, "did you mean 'shape'?"),
        ({"mix": {"zzz": 1}}, "unknown option of mix 'zzz'; valid: cutmix, mixup, probability, switch"),
    ],
)
def test_an_unknown_key_is_told_the_nearest(change: dict[str, object], said: str) -> None:
    assert said in message(resolve, {**MINIMAL, **change})


@pytest.mark.parametrize("key", ["model", "epochs"])
def test_what_every_recipe_must_say(key: str) -> None:
    assert message(resolve, {name: MINIMAL[name] for name in MINIMAL if name != key}) == f"recipe: {key} is missing"


@pytest.mark.parametrize(
    "change",
    [
        "epochs=0",
        "augment.hflip=1.5",
        "loss.smoothing=1",
        "optimizer.layer_decay=0",
        "teacher=self",
        "switches=[{option: r, value: 1, epoch: 0}]",
    ],
)
def test_values_out_of_range(write, change: str) -> None:
    path = write("mine", "model: test_vit\nepochs: 1")
    text = message(load_recipe, path, [change])
    assert text.startswith("mine: ")
    assert change.partition("=")[0] in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["micro_batch=3", "batch_size=8"], "not a multiple of micro_batch 3"),
        (["distil.kind=hard"], "set teacher=dense"),
        (["teacher_checkpoint=weights.safetensors"], "set teacher=dense"),
        (["loss.name=asl", "mix.mixup=0.8"], "mix.mixup=0"),
        (["ramps=[{option: r, start: 0, stop: 8, begin_epoch: 3, end_epoch: 3}]"], "after begin_epoch 3"),
    ],
)
def test_values_that_do_not_fit_together(write, changes: list[str], said: str) -> None:
    path = write("mine", "model: test_vit\nepochs: 1")
    assert said in message(load_recipe, path, changes)


def test_a_name_that_no_recipe_has() -> None:
    assert "did you mean 'evit_deit_small'" in message(load_recipe, "evit_deit_smal")
    assert message(load_recipe, "nowhere/mine.yaml") == "no recipe file nowhere/mine.yaml"


@pytest.mark.parametrize("text", ["- a\n- b", "", "epochs: [1"])
def test_files_that_are_no_recipe(write, text: str) -> None:
    assert "mine.yaml" in message(load_recipe, write("mine", text))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00epochs")
    assert "cannot read" in message(load_recipe, path)


# ---- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("optimizer.lr=1.5E-4", "optimizer.lr", 1.5e-4),
        ("epochs=0.5", "epochs", 0.5),
        ("micro_batch=null", "micro_batch", None),
        ("optimizer.betas=[0.9, 0.95]", "optimizer.betas", [0.9, 0.95]),
        ('trainable=["*.reducer.*", "head.*"]', "trainable", ["*.reducer.*", "head.*"]),
        ("optimizer.decay_all=true", "optimizer.decay_all", True),
        ("method=topk:keep_rate=0.5,blocks=[3,6,9]", "method", "topk:keep_rate=0.5,blocks=[3,6,9]"),
    ],
)
def test_changes_of_every_kind(write, change: str, key: str, value: object) -> None:
    resolved = load_recipe(write("mine", "model: test_vit\nepochs: 1"), [change])
    assert {name: (given, where) for name, given, where in resolved.rows()}[key] == (value, COMMAND_LINE)


def test_changes_in_python_are_values(write) -> None:
    path = write("mine", "model: test_vit\nepochs: 1")
    changes = {"optimizer.lr": 0.5, "optimizer.betas": (0.1, 0.2), "schedule": {"min_lr": 0.0}, "method": "tome:r=4"}
    recipe = load_recipe(path, changes).recipe
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.schedule.min_lr) == (0.5, (0.1, 0.2), 0.0)
    assert recipe.method == "tome:r=4"
    text = message(load_recipe, path, {"optimizer.rate": 1})
    assert "unknown option of optimizer 'rate'" in text


def test_the_last_change_of_a_key_counts_and_the_others_stay(write) -> None:
    path = write("mine", "model: test_vit\nepochs: 1\noptimizer: {lr: 1.0, clip: 2.0}")
    options = load_recipe(path, ["optimizer.lr=0.5", "epochs=2", "optimizer.lr=0.25"]).recipe.optimizer
    assert (options.lr, options.clip) == (0.25, 2.0)


@pytest.mark.parametrize("change", ["epochs", "=3", ""])
def test_a_change_without_key_or_value(write, change: str) -> None:
    assert "key=value" in message(load_recipe, write("mine", "model: test_vit\nepochs: 1"), [change])


def test_a_change_that_is_no_yaml(write) -> None:
    path = write("mine", "model: test_vit\nepochs: 1")
    assert "it is not valid YAML" in message(load_recipe, path, ["optimizer.betas=[0.9"])
    assert "it is not valid YAML" in message(load_recipe, path, ["trainable=*.reducer.*"])  # * starts an alias


KEYS = st.sampled_from(
    [*Recipe.model_fields, "optimizer.lr", "mix.mixup", "ema.decay", "augment.scale", "ramps", "x.y"]
)
VALUES = st.one_of(
    st.text(st.characters(codec="ascii", categories=("L", "P", "S")), max_size=12),
    st.floats().map(str),
    st.integers(-10, 10**6).map(str),
    st.sampled_from(["null", "true", "[]", "{}", "[1, 2]", "{a: 1}", "1e-4"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(KEYS, VALUES), max_size=3))
def test_changes_are_taken_or_refused_in_one_line(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: test_vit\nepochs: 1")
    try:
        resolved = load_recipe(path, [f"{key}={value}" for key, value in pairs])
    except VitrimError as error:
        refusal = str(error)
    else:
        refusal = "taken"
        assert resolve(resolved.recipe.model_dump()).recipe == resolved.recipe
    assert len(refusal.splitlines()) == 1


@given(st.floats(1e-30, 1e30))
def test_numbers_arrive_as_they_are_written(lr: float) -> None:
    for text in (repr(lr), f"{lr:.17e}"):
        assert load_recipe("deit_small", [f"optimizer.lr={text}"]).recipe.optimizer.lr == lr


def test_recipes_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("deit_small").recipe.epochs = 3  # type: ignore[misc]


def test_the_recipes_are_files_by_their_names_and_rows_of_a_table() -> None:
    found = recipes()
    assert list(found) == sorted(found)
    assert all(path.is_file() for path in found.values())
    assert {name for name, path in found.items() if path.suffix == ".csv"} == {name for name in found if "@" in name}
    assert all(found[name].as_posix().endswith(f"recipes/{name}.yaml") for name in found if "@" not in name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: test_vit\nepochs: 1\noptimizer: {lr: 1, lr: 2}\n", "the key lr comes twice"),
        ("model: test_vit\nepochs: true\n", "epochs=true: must be a number"),
        ("model: hf:folder\nepochs: 1\ninit: mimetic\n", "init is for models of timm that are not pretrained"),
    ],
)
def test_what_yaml_would_pass_over_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(VitrimError, match=message):
        load_recipe(tmp_path / "mine.yaml")


def test_null_takes_all_options_of_the_base_away_and_merge_keys_are_read(tmp_path: Path) -> None:
    text = "base: cifar10_vit\nmodel_options: null\noptimizer: {lr: 0.1}\nschedule: {<<: {min_lr: 0.2}, shift: true}\n"
    (tmp_path / "mine.yaml").write_text(text)
    found = load_recipe(tmp_path / "mine.yaml").recipe
    assert (found.model_options, found.optimizer.lr, found.schedule.min_lr) == ({}, 0.1, 0.2)


# ---- what nobody writes, but a broken file or a slip of the hand does -----------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("objective: &a {b: *a}", "mine: a section lies within itself"),
        (f"objective: {{a: {'[' * 1000}{']' * 3000}}}", "maximum recursion depth exceeded"),
        ("seed: 2020-99-99", "month must be in 1..12"),
        ("base: ../other", "base is the name of a recipe"),
        ("base: list", "list.yaml is not a recipe"),
    ],
)
def test_files_that_are_broken_are_refused_in_one_short_line(write, text: str, said: str) -> None:
    write("list", "- a\n- b")
    write("table", "table: 3")
    refusal = message(load_recipe, write("mine", f"model: test_vit\nepochs: 1\n{text}"))
    assert said in refusal
    assert len(refusal) < 500


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("augment.repeats=1000000", "augment.repeats=1000000: must be at most 1000"),
        ("schedule.cooldown_epochs=1e300", "must be at most 10000000"),
        ("schedule.warmup_epochs=1e300", "must be at most 10000000"),
        ("optimizer.freeze_epochs=1e300", "must be at most 10000000"),
        ("eval_split=[1]", "expected the name of a part of the data"),
        ("eval_split=1", "eval_split=1: a share of the training images is above 0 and below 1"),
    ],
)
def test_changes_far_out_of_range_are_refused_in_one_short_line(write, change: str, said: str) -> None:
    refusal = message(load_recipe, write("mine", "model: test_vit\nepochs: 1"), [change])
    assert said in refusal
    assert len(refusal) < 500


def test_aliases_that_end_are_read(write) -> None:
    path = write("mine", "model: test_vit\nepochs: 1\nobjective: {a: &a [1, 2], b: *a}")
    assert load_recipe(path).recipe.objective == {"a": [1, 2], "b": [1, 2]}


def test_a_stream_holds_no_images_out() -> None:
    assert "no images can be held out" in message(resolve, {**MINIMAL, "stream": True, "eval_split": 0.1})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"schedule": {"shape": "constant", "cooldown_epochs": 2}},
            "cooldown_epochs are at min_lr, which",
        ),
        (
            {"schedule": {"shape": "steps", "milestones": [2], "warmup_epochs": 2, "shift": True}},
            "milestones are epochs above 2, ascending",
        ),
        (
            {"task": "segmentation", "teacher": "dense", "distil": {}},
            "distil learns from logits of one label per image: leave it out for task segmentation",
        ),
    ],
)
def test_options_without_a_meaning_together_are_refused(given: dict, expected: str) -> None:
    assert expected in message(resolve, {**MINIMAL, **given})
