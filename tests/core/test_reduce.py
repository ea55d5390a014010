"""Bad input is one line, and the model is then exactly as it was."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import vision_transformer as timm_vit
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core import registry
from vitrim.core.block import Idle, ReducedBlock
from vitrim.core.schedule import Amount, keep_rate


def vit(host: str = "vit") -> nn.Module:
    return tiny.HOSTS[host]()


# ---- a small learned method, known to the registry where a test asks for it ----------------------------------------


class Learned(vitrim.MethodConfig):
    """Keep the patches that a learned direction points at."""

    name = "test_learned"
    rate: float = 0.5
    runtime = frozenset({"rate"})

    def amounts(self, num_layers: int) -> list[Amount | None]:
        return keep_rate(self.rate, (1, 2), "floor_initial_power", num_layers)


@vitrim.reduces(Learned)
class LearnedReducer(vitrim.Reducer[Learned]):
    site = "before"

    def __init__(self, config: Learned, layer: vitrim.Layer) -> None:
        super().__init__(config, layer)
        self.direction = nn.Linear(layer.dim, 1)

    def reduce(self, site: Any, x: Tensor, attention: Any, state: vitrim.TokenState) -> Any:
        if site == "before":
            state = state.report("scores", self.layer.depth, self.direction(x))
        return super().reduce(site, x, attention, state)

    def assign(self, x: Tensor, attention: Any, state: vitrim.TokenState) -> vitrim.Hard:
        score = self.direction(x)[:, state.num_prefix :, 0]
        return vitrim.prune(state, score.topk(self.num_keep(state), dim=1).indices)


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> type[Learned]:
    registry.methods()
    monkeypatch.setitem(registry._METHODS, Learned.name, Learned)
    return Learned


# ---- the model is as it was ----------------------------------------------------------------------------------------


@contextmanager
def unchanged(model: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Classes, attributes, mode, parameters and output of ``model`` are afterwards what they were, bit for bit."""

    def snapshot() -> tuple[Any, ...]:
        modules = list(model.modules())
        kinds = [(type(module), module.training, sorted(vars(module)), sorted(module._modules)) for module in modules]
        hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
        with torch.no_grad():
            torch.manual_seed(7)
            out = tiny.logits(model(inputs))
            out = out if isinstance(out, Tensor) else torch.cat([part.flatten() for part in out])
        return kinds, hooks, {name: value.clone() for name, value in model.state_dict().items()}, out

    before = snapshot()
    yield
    after = snapshot()
    assert after[:2] == before[:2]
    assert list(after[2]) == list(before[2])
    assert all(torch.equal(value, after[2][name]) for name, value in before[2].items())
    assert torch.equal(after[3], before[3])


def refused(message: str, error: type[Exception] = vitrim.VitrimError) -> Any:
    return pytest.raises(error, match=message)


class LastAfter(vitrim.MethodConfig):
    """Acts after the last block, which then cannot be cut down to the class token."""

    name = "test_after"
    last_block: str = "class_token"


@vitrim.reduces(LastAfter)
class AfterReducer(vitrim.Reducer[LastAfter]):
    site = "after"
    everywhere = True


class FailsLate(vitrim.MethodConfig):
    """Cannot build its third reducer."""

    name = "test_fails_late"


@vitrim.reduces(FailsLate)
def fail_late(config: FailsLate, layer: vitrim.Layer) -> None:
    if layer.depth == 2:
        raise vitrim.VitrimError("the third block is not for me")


class Mixed(vitrim.MethodConfig):
    """Prunes and merges: a head that averages patches cannot weigh the result."""

    name = "test_mixed"
    kind = "mixed"


vitrim.reduces(Mixed)(Idle)


@pytest.mark.parametrize(
    ("host", "method", "message"),
    [
        ("vit", "tomme:r=3", r"unknown method 'tomme'; did you mean 'tome'\?"),
        ("vit", "tome:r=-3", "r=-3: must be at least 0"),
        ("vit", 13, r"expected a method such as vitrim.ToMe\(r=13\) or 'tome:r=13', got int"),
        ("vit", None, "expected a method such as .* got NoneType"),
        ("vit", "tome:r=[1,1,1,1,1]", "the list has 5 amounts but the model has 4 blocks"),
        ("vit", "topk:blocks=[9]", r"blocks \[9\] do not exist: the model has blocks 0 to 3"),
        ("vit", "l2:blocks=[1,1]", "name a block twice"),
        ("vit", LastAfter(), "acts after the last block and needs all of its tokens; use last_block=full"),
        ("vit", FailsLate(), "the third block is not for me"),
        ("map", "evit", "this model has none; use score=column_mean"),
        ("avg_fc_norm", Mixed(), "would weigh wrongly; use it on a model whose head reads the class token"),
        ("avg_fc_norm", "none:last_block=class_token", "head reads its patch tokens; use last_block=full or auto"),
    ],
)
def test_a_method_that_does_not_fit_leaves_the_model_as_it_was(host: str, method: Any, message: str) -> None:
    model = vit(host)
    with unchanged(model, tiny.images()), refused(message):
        vitrim.reduce_(model, method)
    vitrim.reduce_(model, "none")  # and it can still be reduced


def test_reducing_again_replaces_the_reduction() -> None:
    model, fresh = vit(), vit()
    old = vitrim.reduce_(model, "tome:r=4")
    reduction = vitrim.reduce_(model, "topk:keep_rate=0.5")
    assert vitrim.get_reduction(model) is reduction
    vitrim.reduce_(fresh, "topk:keep_rate=0.5")
    assert torch.equal(model(tiny.images()), fresh(tiny.images()))
    with refused("this reduction was undone"):
        old.set(r=2)
    with unchanged(fresh, tiny.images()):
        vitrim.reduce_(fresh, "topk:keep_rate=0.5")  # a cell of a notebook, run twice
    vitrim.restore_(model)
    assert torch.equal(model(tiny.images()), vit()(tiny.images()))


@pytest.mark.parametrize("host", ["vit", "hf_vit", "torchvision_vit", "hf_eomt"])
@pytest.mark.parametrize("old", ["tome:r=4", "algm", "topk"])
def test_what_cannot_replace_a_reduction_leaves_it_as_it_was(host: str, old: str) -> None:
    model = vit(host)
    reduction = vitrim.reduce_(model, old, record=True)
    with unchanged(model, tiny.given(host)), refused("the third block is not for me"):
        vitrim.reduce_(model, FailsLate())
    assert vitrim.get_reduction(model) is reduction
    assert len(reduction.states) == len(reduction.tokens_per_block) + 1
    vitrim.restore_(model)
    assert torch.equal(
        torch.cat([p.flatten() for p in model.parameters()]), torch.cat([p.flatten() for p in vit(host).parameters()])
    )


def test_learned_parameters_are_not_thrown_away() -> None:
    model = vit()
    reduction = vitrim.reduce_(model, Learned())
    message = r"model is reduced by test_learned, whose learned parameters would be lost: keep them with reduc"
    with unchanged(model, tiny.images()), refused(message):
        vitrim.reduce_(model, "tome:r=4")
    with vitrim.reduced(model, "tome:r=4"):  # for a while is another thing: they come back
        assert vitrim.get_reduction(model) is not reduction
    assert vitrim.get_reduction(model) is reduction
    vitrim.restore_(model)
    vitrim.reduce_(model, "tome:r=4")


def test_restoring_a_dense_model_does_nothing() -> None:
    model = vit()
    vitrim.reduce_(model, "tome:r=4")
    vitrim.restore_(model)
    with unchanged(model, tiny.images()):
        vitrim.restore_(model)
    assert vitrim.get_reduction(model) is None
    with refused("expected a torch.nn.Module to restore, got str"):
        vitrim.restore_("deit_small_patch16_224")


def test_restoring_a_part_of_what_was_reduced_is_refused() -> None:
    model: Any = vit("hf_vit")
    vitrim.reduce_(model, "tome:r=4")
    with unchanged(model, tiny.images()), refused("this ReducedViTLayer is a part of what was reduced"):
        vitrim.restore_(tiny.blocks(model)[0])


def test_a_model_is_reduced_for_the_time_of_a_with_statement() -> None:
    model = vit()
    with unchanged(model, tiny.images()):
        with vitrim.reduced(model, "tome:r=4", record=True) as reduction:
            model(tiny.images())
            assert reduction.tokens_per_block == [33, 29, 25, 21]
        with pytest.raises(ZeroDivisionError), vitrim.reduced(model, "topk"):
            raise ZeroDivisionError
        with refused("the third block is not for me"), vitrim.reduced(model, FailsLate()):
            pass
    first = vitrim.reduce_(model, "tome:r=2")
    with unchanged(model, tiny.images()):
        with vitrim.reduced(model, "topk") as inner:
            assert vitrim.get_reduction(model) is inner
        with refused("the third block is not for me"), vitrim.reduced(model, FailsLate()):
            pass
    assert vitrim.get_reduction(model) is first


# ---- hosts that are not supported ----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 1, "num_classes": 3}

UNSUPPORTED: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(16, 3),
    "SwinTransformer": lambda: SwinTransformer(
        img_size=16, patch_size=4, window_size=2, embed_dim=8, depths=(1,), num_heads=(1,), num_classes=3
    ),
    "Cait": lambda: Cait(depth=1, **SMALL),
    "Xcit": lambda: Xcit(depth=1, **SMALL),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_hosts_are_named_with_the_reason_or_where_the_supported_ones_are_listed(name: str) -> None:
    model = UNSUPPORTED[name]().eval()
    inputs = torch.randn(2, 16) if name == "Linear" else torch.randn(2, 3, 16, 16)
    message = {
        "Linear": r"^Linear \(from .*\) is not a supported host; `vitrim list hosts` prints those that are$",
        "SwinTransformer": r"^model \(SwinTransformer\) is refused: its windows shift .*; for classification use a",
        "Cait": r"^model \(Cait\) is refused: its attention mixes heads .*; use a deit3",
        "Xcit": r"^model \(Xcit\) is refused: it attends among channels.*; use a plain ViT",
    }[name]
    with unchanged(model, inputs), refused(message, vitrim.UnsupportedModelError):
        vitrim.reduce_(model, "tome:r=1")


@pytest.mark.parametrize("model", ["deit_small", None, torch.nn.Linear], ids=str)
def test_what_is_not_a_model_is_refused(model: Any) -> None:
    with refused("expected a torch.nn.Module to reduce, got (str|NoneType|type)"):
        vitrim.reduce_(model, "tome:r=1")


class OtherBlock(timm_vit.Block):
    pass


def test_one_odd_block_among_others_is_refused_before_any_is_changed() -> None:
    model = vit()
    model.blocks[3] = OtherBlock(32, 2, qkv_bias=True).eval()
    with unchanged(model, tiny.images()), refused("blocks of class OtherBlock", vitrim.UnsupportedModelError):
        vitrim.reduce_(model, "tome:r=1")
    assert type(model.blocks[0]) is timm_vit.Block


# ---- amounts that cannot be met ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "removed"),
    [
        ("tome:r=12", r"\[12, 12, 6, 3\], 33"),
        ("tome:r=[30]", r"\[18, 0, 0, 0\], 18"),
        ("topk:keep_rate=0.1", r"\[0, 33, 2, 0\], 35"),
        ("tome:keep_rate=0.3", r"\[0, 18, 9, 4\], 31"),
    ],
)
def test_capped_amounts_are_told_with_what_the_blocks_really_remove(text: str, removed: str) -> None:
    config = registry.parse_method(text)
    message = f"{re.escape(text)} asks for more than 36 patch tokens allow; the blocks remove {removed} in all"
    model = vit()
    with pytest.warns(vitrim.ReductionWarning, match=message) as caught:
        reduction = vitrim.reduce_(model, config, record=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # it points at the line that asked
    assert "\n" not in str(caught[0].message)
    with torch.no_grad():
        model(tiny.images())
    left = [state.num_tokens for state in reduction.states]
    really = [before - after for before, after in pairwise(left)]
    assert f"the blocks remove {really}, {sum(really)} in all" in str(caught[0].message)


def test_tokens_that_come_back_are_told_as_such() -> None:
    message = r"the blocks remove \[0, 31, 4, -35\], 0 in all; a negative number is of tokens that come back"
    with pytest.warns(vitrim.ReductionWarning, match=message):
        vitrim.reduce_(vit(), "cropr:r=30")


@pytest.mark.parametrize("host", ["timm", "transformers"])
def test_sizes_in_the_attention_of_a_masked_autoencoder_are_told(host: str) -> None:
    def model() -> nn.Module:
        if host == "transformers":
            return tiny.FURTHER["hf_vit_mae"]()
        return timm.create_model("vit_base_patch16_224.mae", embed_dim=24, depth=2, num_heads=2, img_size=32)

    for method in ("tome:r=1", "atm:alpha=0.9"):
        with pytest.warns(vitrim.ReductionWarning, match=f"^{method} adds log.size. to the att") as caught:
            vitrim.reduce_(model(), method)
        assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", vitrim.ReductionWarning)
        for method in ("tome:r=1,proportional=false", "tome:r=1,proportional=true", "topk:keep_rate=0.9"):
            vitrim.reduce_(model(), method)
        vitrim.reduce_(vit(), "tome:r=1")  # no masked autoencoder


def test_strict_refuses_what_would_be_capped() -> None:
    model = vit()
    with unchanged(model, tiny.images()), refused(r"the blocks remove \[12, 12, 6, 3\].*because strict=true"):
        vitrim.reduce_(model, "tome:r=12,strict=true")


def test_amounts_that_can_be_met_are_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("tome:r=3,strict=true", "evit:keep_rate=0.9,strict=true", "topk:keep_rate=0.5,strict=true", "atm"):
            vitrim.reduce_(vit(), text)


def test_strict_also_guards_what_is_set_later() -> None:
    model = vit()
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=3, strict=True))
    with unchanged(model, tiny.images()):
        with refused("because strict=true"):
            reduction.set(r=30)
        with refused("the list has 5 amounts"):
            reduction.set(r=[1] * 5)
        with refused("tome cannot change kept_order, strict at run time; it can: inflect, keep_rate, r"):
            reduction.set(strict=False, kept_order="similarity", r=1)
        with refused("tome cannot change rr at run time"):
            reduction.set(rr=1)
    assert reduction.config == vitrim.ToMe(r=3, strict=True)
    reduction.set(r=2)
    model(tiny.images())
    assert reduction.state.num_tokens == 37 - 8


@pytest.mark.parametrize(
    ("method", "amounts"),
    [
        ("topk", {"keep_rate": [0.5]}),
        ("topk", {"keep_rate": [0.5, True, 0.5]}),
        ("topk", {"keep_rate": {0.9, 0.5, 0.7}}),
        ("mctf:r=4", {"r": [4] * 9}),
        ("cropr:r=4", {"r": [4] * 9}),
        ("cropr:r=4", {"per": 2}),
        ("atm:theta=[0.9,0.9,0.9,0.9]", {"theta": [0.9]}),
        ("evo_vit", {"blocks": []}),
    ],
)
def test_a_list_that_is_refused_leaves_the_reduction_as_it_was(method: str, amounts: dict[str, Any]) -> None:
    model = vit()
    reduction = vitrim.reduce_(model, method)
    config = reduction.config
    with unchanged(model, tiny.images()), pytest.raises(vitrim.VitrimError):
        reduction.set(**amounts)
    assert reduction.config is config


def test_a_method_without_run_time_options_says_so() -> None:
    reduction = vitrim.reduce_(vit(), "none")
    with refused("none cannot change strict at run time; it can: none"):
        reduction.set(strict=True)


# ---- reading the handle --------------------------------------------------------------------------------------------


def test_there_is_no_state_before_a_complete_forward() -> None:
    model = vit()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    for read in (lambda: reduction.state, lambda: reduction.states, lambda: reduction.tokens_per_block):
        with refused("no states? yet: run the reduced model to its last block"):
            read()
    model(tiny.images())
    assert reduction.state.num_tokens == 21
    assert reduction.tokens_per_block == [33, 29, 25, 21]

    def stop(module: nn.Module, inputs: Any, output: Tensor) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[2].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(tiny.images())
    hook.remove()
    for read in (lambda: reduction.state, lambda: reduction.states):  # not those of the forward before
        with refused("no states? yet"):
            read()
    model(tiny.images())
    assert reduction.tokens_per_block == [33, 29, 25, 21]


def test_states_need_recording() -> None:
    model = vit()
    reduction = vitrim.reduce_(model, "tome:r=4")
    model(tiny.images())
    with refused(r"only when recording: vitrim.reduce_\(..., record=True\)"):
        _ = reduction.states


def test_auxiliary_outputs_come_in_block_order_and_unknown_names_list_what_there_is() -> None:
    model = vit()
    reduction = vitrim.reduce_(model, Learned())
    model(tiny.images())
    assert [tuple(scores.shape) for scores in reduction.aux("scores")] == [(2, 37, 1), (2, 19, 1)]
    with refused("no auxiliary output 'logits'; this forward has: scores"):
        reduction.aux("logits")
    plain = vit()
    reduction = vitrim.reduce_(plain, "tome:r=4")
    plain(tiny.images())
    with refused("no auxiliary output 'logits'; this forward has: none"):
        reduction.aux("logits")


# ---- save and load -------------------------------------------------------------------------------------------------


def saved(folder: Path, learned: type[Learned]) -> Path:
    vitrim.reduce_(vit(), learned(rate=0.6)).save(folder)
    return folder


def test_learned_parameters_come_back(tmp_path: Path, learned: type[Learned]) -> None:
    model = vit()
    first = vitrim.reduce_(model, learned(rate=0.6))
    first.save(tmp_path / "deep" / "folder")
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == [
        "reducers.safetensors",
        "reduction.json",
    ]
    twin = vit()
    reduction = vitrim.Reduction.load(twin, str(tmp_path / "deep" / "folder"), record=True)
    assert reduction.config == learned(rate=0.6)
    with torch.no_grad():
        assert torch.equal(twin(tiny.images()), model(tiny.images()))
    assert reduction.tokens_per_block == [37, 22, 13, 13]


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "reduction.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (record | changes).items() if value is not ...}))


def weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "reducers.safetensors")
    change(tensors)
    save_file(tensors, folder / "reducers.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "no saved reduction in .*: reduction.json is missing"),
    "no config": (lambda f: (f / "reduction.json").unlink(), "reduction.json is missing"),
    "broken JSON": (lambda f: (f / "reduction.json").write_text('{"format": 1,'), "is not valid JSON"),
    "deep JSON": (lambda f: (f / "reduction.json").write_text("[" * 10**5 + "]" * 10**5), "valid JSON .maximum"),
    "digits": (lambda f: (f / "reduction.json").write_text('{"format": ' + "9" * 5000 + "}"), "valid JSON .Exceeds"),
    "not text": (lambda f: (f / "reduction.json").write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    "not an object": (lambda f: (f / "reduction.json").write_text("[]"), "must be options by name"),
    "no method": (lambda f: edit(f, method=...), "method is missing"),
    "options of another kind": (lambda f: edit(f, options=[1]), r"options=.1.: must be"),
    "other format": (lambda f: edit(f, format=2), "has format 2, this version of vitrim reads format 1"),
    "other version": (
        lambda f: edit(f, version=2),
        "saved holds version 2 of test_learned, this vitrim has version 1$",
    ),
    "unknown method": (lambda f: edit(f, method="test_lerned"), "unknown method 'test_lerned'; did you mean 'test_"),
    "unknown option": (
        lambda f: edit(f, options={"ratte": 1}),
        r"unknown option of test_learned 'ratte'; did you .*'ra",
    ),
    "bad value": (
        lambda f: edit(f, options={"rate": "much"}),
        "test_learned: rate=much: must be a number",
    ),
    "no weights file": (lambda f: (f / "reducers.safetensors").unlink(), "cannot read .*reducers.safetensors"),
    "broken weights": (
        lambda f: (f / "reducers.safetensors").write_bytes(b"junk"),
        "cannot read .*reducers.safetensors",
    ),
    "weights not named": (lambda f: edit(f, weights=None), "do not fit this model: missing 1.direction.bias, .* ..."),
    "missing": (lambda f: weights(f, lambda t: t.pop("2.direction.bias")), "fit .*: missing 2.direction.bias$"),
    "unexpected": (lambda f: weights(f, lambda t: t.update(a=torch.ones(1))), "fit .*: unexpected a$"),
    "renamed": (
        lambda f: weights(f, lambda t: t.update({"3.direction.bias": t.pop("2.direction.bias")})),
        "missing 2.direction.bias; unexpected 3.direction.bias",
    ),
    "complex": (
        lambda f: weights(f, lambda t: t.update({"1.direction.bias": t["1.direction.bias"].to(torch.complex64)})),
        "1.direction.bias is complex64, expected float32$",
    ),
    "not a number": (
        lambda f: weights(f, lambda t: t["1.direction.bias"].fill_(torch.nan)),
        "1.direction.bias has values that are not finite numbers in float32$",
    ),
    "too large": (
        lambda f: weights(f, lambda t: t.update({"1.direction.bias": torch.full((1,), 1e300, dtype=torch.float64)})),
        "1.direction.bias has values that are not finite numbers in float32$",
    ),
    "compact in words": (lambda f: edit(f, compact="yes"), "compact=yes: must be true or false$"),
    "other shape": (
        lambda f: weights(f, lambda t: t.update({"1.direction.weight": torch.ones(1, 31)})),
        r"1.direction.weight has shape \(1, 31\), expected \(1, 32\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_save_leaves_the_model_as_it_was(damage: str, tmp_path: Path, learned: type[Learned]) -> None:
    folder = saved(tmp_path / "saved", learned)
    spoil, message = DAMAGE[damage]
    spoil(folder)
    model = vit()
    with unchanged(model, tiny.images()), refused(message):
        vitrim.Reduction.load(model, folder)
    vitrim.reduce_(model, "tome:r=4")


def test_a_save_for_another_geometry_or_host_is_refused(tmp_path: Path, learned: type[Learned]) -> None:
    folder = saved(tmp_path / "saved", learned)
    wider = tiny.vit(embed_dim=64)()
    with unchanged(wider, tiny.images()), refused(r"has shape \(1, 32\), expected \(1, 64\)"):
        vitrim.Reduction.load(wider, folder)
    with refused("is not a supported host", vitrim.UnsupportedModelError):
        vitrim.Reduction.load(nn.Linear(2, 2), folder)
    reduced = vit()
    vitrim.reduce_(reduced, "tome:r=4")
    with unchanged(reduced, tiny.images()), refused("reduced already"):
        vitrim.Reduction.load(reduced, folder)


def test_a_method_without_parameters_saves_only_its_options(tmp_path: Path) -> None:
    reduction = vitrim.reduce_(vit(), "atm:beta=0.1")
    reduction.set(alpha=0.9)
    reduction.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["reduction.json"]
    assert vitrim.Reduction.load(vit(), tmp_path).config == vitrim.ATM(alpha=0.9, beta=0.1)


# ---- what a reduced model is made of -------------------------------------------------------------------------------


def test_every_block_is_reduced_also_those_that_remove_nothing() -> None:
    model = vit()
    vitrim.reduce_(model, Learned())
    assert all(isinstance(block, ReducedBlock) for block in model.blocks)
    assert [type(block.reducer) for block in model.blocks] == [Idle, LearnedReducer, LearnedReducer, Idle]


@pytest.mark.parametrize("method", [config for config in tiny.configs() if config.name != "none"], ids=lambda c: c.name)
def test_an_empty_batch_comes_out_empty(method: vitrim.MethodConfig) -> None:
    model = vit()
    assert model(tiny.images()[:0]).shape == (0, 5)  # as it does without vitrim
    vitrim.reduce_(model, method)
    assert model(tiny.images()[:0]).shape == (0, 5)


# ---- what would break later is refused now ---------------------------------------------------------------------------


def test_a_block_in_two_places_is_refused() -> None:
    model = tiny.HOSTS["vit"]()
    model.blocks[2] = model.blocks[1]
    with refused("stands in two places", vitrim.UnsupportedModelError):
        vitrim.reduce_(model, "tome:r=4")


@pytest.mark.parametrize("host", ["vit", "hf_vit", "torchvision"])
def test_hooks_on_the_attention_module_are_refused(host: str) -> None:
    model = tiny.HOSTS[host]() if host in tiny.HOSTS else tiny.HOSTS["torchvision_vit"]()
    block = tiny.blocks(model)[1]
    attn = next(getattr(block, name) for name in ("attn", "attention", "self_attention") if hasattr(block, name))
    handle = attn.register_forward_hook(lambda module, args, out: None)
    with refused("has hooks or a forward of its own", vitrim.UnsupportedModelError):
        vitrim.reduce_(model, "tome:r=4")
    handle.remove()
    vitrim.reduce_(model, "tome:r=4")


def test_hidden_states_asked_for_before_do_not_stand_in_the_way() -> None:
    model = tiny.HOSTS["hf_vit"]()
    with torch.no_grad():
        model(tiny.images(), output_hidden_states=True)  # the library leaves recording hooks, on attention too
    vitrim.reduce_(model, "tome:r=4")


def test_a_block_that_was_replaced_is_left_alone_by_restore() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, "tome:r=4")
    model.blocks[1] = own = tiny.HOSTS["vit"]().blocks[1]
    vitrim.restore_(model)
    assert model.blocks[1] is own
    assert {type(block) for block in model.blocks} == {type(own)}


def test_a_reduction_that_was_undone_answers_no_more(tmp_path: Path) -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tome:r=4")
    vitrim.restore_(model)
    with refused("this reduction was undone"):
        reduction.set(r=3)
    with refused("this reduction was undone"):
        reduction.save(tmp_path)


@pytest.mark.parametrize("method", ["tome:r=4", "topk:keep_rate=0.5", "gtp"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.reset_classifier(10, global_pool="avg"),
        lambda model: setattr(model, "global_pool", "avg"),
        lambda model: model.set_input_size((12, 48)),
    ],
    ids=["reset_classifier", "global_pool", "set_input_size"],
)
def test_pooling_or_size_changed_after_reducing_is_noticed(change: Callable[[Any], None], method: str) -> None:
    model = tiny.HOSTS["vit"]().eval()
    vitrim.reduce_(model, method)
    change(model)
    height, width = model.patch_embed.img_size
    images = torch.randn(2, 3, height, width)
    with pytest.raises(vitrim.UnsupportedModelError, match="was changed after it was reduced"):
        model(images)
    vitrim.restore_(model)
    dense = model(images)
    vitrim.reduce_(model, method)
    assert model(images).shape == dense.shape


def test_a_new_classifier_of_the_same_pooling_is_followed() -> None:
    model = tiny.HOSTS["vit"]().eval()
    vitrim.reduce_(model, "tome:r=4")
    model.reset_classifier(3)
    assert model(tiny.images()).shape == (2, 3)


def test_a_copy_notices_a_change_of_its_own_and_no_other() -> None:
    model = tiny.HOSTS["vit"]().eval()
    vitrim.reduce_(model, "tome:r=4")
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.reset_classifier(10, global_pool="avg")
    for twin in twins:
        twin(tiny.images())
        twin.global_pool = "avg"
        with pytest.raises(vitrim.UnsupportedModelError, match="was changed after it was reduced"):
            twin(tiny.images())


@pytest.mark.parametrize("folder", [None, "", 3], ids=repr)
def test_what_is_no_folder_is_one_line(folder: Any) -> None:
    model = tiny.HOSTS["vit"]()
    with refused(f"a reduction is saved in a folder, and {folder!r} names none"):
        vitrim.Reduction.load(model, folder)
    reduction = vitrim.reduce_(model, "tome:r=4")
    for answer in (reduction.save, reduction.load_parameters):
        with refused(f"a reduction is saved in a folder, and {folder!r} names none"):
            answer(folder)


def test_learned_parameters_are_readable_by_others(tmp_path: Path) -> None:
    vitrim.reduce_(tiny.HOSTS["vit"](), "patchmerger").save(tmp_path)
    (tmp_path / "other").touch()
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["reducers.safetensors"] == modes["reduction.json"] == modes["other"]
