from __future__ import annotations

import copy
import pickle
import re
import string
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import tiny
import vitrim
from vitrim.core import registry, tables
from vitrim.core.host import Host
from vitrim.core.registry import host_of, hosts, make_method, methods, parse_method, selectors
from vitrim.hosts.timm.vit import TimmViT

# ---- reading a method ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("none", vitrim.NoReduction()),
        ("tome", vitrim.ToMe()),
        ("tome:", vitrim.ToMe()),
        ("tome:r=13", vitrim.ToMe(r=13)),
        ("tome:r=[16,8,4]", vitrim.ToMe(r=(16, 8, 4))),
        ("tome:r=[16, 8, 4],proportional=false", vitrim.ToMe(r=(16, 8, 4), proportional=False)),
        ("  tome :  r = [ 16 , 8 ] , kept_order = similarity ", vitrim.ToMe(r=(16, 8), kept_order="similarity")),
        ("tome:keep_rate=0.7,blocks=[3,6,9]", vitrim.ToMe(keep_rate=0.7, blocks=(3, 6, 9))),
        ("tome:keep_rate=null,r=3,", vitrim.ToMe(keep_rate=None, r=3)),
        ("tome:r=8,inflect=-1", vitrim.ToMe(r=8, inflect=-1.0)),
        ("evit:keep_rate=0.7,fuse_token=false", vitrim.EViT(keep_rate=0.7, fuse_token=False)),
        ("atm:alpha=0.985,beta=4.5e-2,theta_min=0.88", vitrim.ATM(alpha=0.985, beta=0.045, theta_min=0.88)),
    ],
)
def test_good_text(text: str, config: vitrim.MethodConfig) -> None:
    parsed = parse_method(text)
    assert type(parsed) is type(config)
    assert parsed == config
    assert parsed.model_fields_set == config.model_fields_set


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown method ''; valid: .*atm, "),
        (":r=4", "unknown method ''"),
        ("tomme:r=4", r"unknown method 'tomme'; did you mean 'tome'\? valid: .*, evit, .*tome, topk"),
        ("qqqq", "unknown method 'qqqq'; valid: "),
        ("tome:rr=4", r"unknown option of tome 'rr'; did you mean 'r'\? valid: align, blocks, inflect, "),
        ("tome:name=x", "unknown option of tome 'name'"),  # the first parameter of make_method
        ("tome:self=x", "unknown option of tome 'self'"),
        ("tome:r", "cannot read 'r' in 'tome:r': write name:key=value,key=value, e.g. tome:r=13"),
        ("tome:r=", "cannot read 'r=' in 'tome:r='"),
        ("tome:=4", "cannot read '=4'"),
        ("tome:r=4,r=8", "'r' is given twice in 'tome:r=4,r=8'"),
        ("tome:r=four", r"^tome: r=four: must be a whole number, or a list in brackets$"),
        ("tome:r=true", "tome: r=true: must be a number or a word, not true or false"),
        ("tome:r=[4,true]", r"^tome: r=\[4,true\]: must be a number or a word, not true or false$"),
        ("topk:keep_rate=[0.5,1.5]", "^topk: keep_rate=1.5: must be at most 1$"),
        ("mctf:r=[-1,4]", "^mctf: r=-1: must be at least 0$"),
        ("TOME", "unknown method 'TOME'; did you mean 'tome'"),
        ("tome:r=1.5", r"^tome: r=1.5: must be a whole number, or a list in brackets$"),
        ("tome:r=[16,8", r"^tome: r=\[16,8: must be a whole number"),
        ("tome:r=[4,[2]]", r"^tome: r=\[2\]: must be a whole number$"),
        ("tome:r=4,keep_rate=0.5", "tome: .*either r .* or keep_rate"),
        ("topk:keep_rate=0", r"^topk: keep_rate=0: must be above 0, or a list in brackets$"),
        ("topk:keep_rate=7", r"^topk: keep_rate=7: must be at most 1, or a list in brackets$"),
        ("topk:keep_rate=NaN", "topk: keep_rate=nan"),
        ("topk:rule=floor", "topk: rule=floor: must be 'ceil_current', 'floor_current'"),
        ("topk:blocks=3", r"topk: blocks=3: must be a list in brackets"),
        (
            "topk:rule=floor,keep_rate=2",
            "topk: .*keep_rate=2: .*; .*rule=floor: |topk: .*rule=floor: .*; keep_rate=2: ",
        ),
        ("atm:beta=300", "atm: beta=300: must be at most"),  # exp would overflow
        ("atm:granularity=pixel", "atm: granularity=pixel: must be 'batch' or 'image'"),
    ],
)
def test_bad_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message):
        parse_method(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tome:r=" + "9" * 5000, "r: a value of 5000 characters that cannot be read: 999"),
        ("tome:r=" + "[" * 100_000 + "]" * 100_000, "r: a value of 200000 characters that cannot be read"),
        ("x" * 400, "unknown method 'xxx"),
        ("tome:r=" + "z" * 400, "tome: r=zzz"),
        ("tome:" + "y" * 400 + "=1", "unknown option of tome 'yyy"),
        ("tome:\nr=\n", "cannot read"),
        ("topk:blocks=[" + ",".join(["-1"] * 5000) + "]", "characters"),
    ],
    ids=lambda text: text[:12],
)
def test_long_text_is_refused_in_a_short_line(text: str, message: str) -> None:
    with pytest.raises(vitrim.VitrimError) as caught:
        vitrim.reduce_(tiny.HOSTS["vit"](), text)
    assert message in str(caught.value)


def test_a_number_that_python_does_not_write() -> None:
    for number in (10**400, -(10**400), 10**10_000):
        for options in ({"r": number}, {"r": [1, number]}, {"keep_rate": number}):
            with pytest.raises(vitrim.VitrimError, match=r"a number of \d+ bits\]?: must be below"):
                make_method("tome", **options)
        with pytest.raises(vitrim.VitrimError, match="a number of"):
            vitrim.reduce_(tiny.HOSTS["vit"](), "tome:r=1").set(r=number)


@pytest.mark.parametrize("given", [None, 3, b"tome", ["tome"], object()], ids=lambda given: type(given).__name__)
def test_what_is_no_text_is_one_line(given: Any) -> None:
    with pytest.raises(vitrim.VitrimError, match="expected the name of a method"):
        make_method(given)
    with pytest.raises(vitrim.VitrimError, match="expected a method as text"):
        parse_method(given)


@pytest.mark.parametrize("name", sorted(methods()))
def test_options_do_not_change(name: str) -> None:
    config = make_method(name)
    before = config.describe()
    for key in (*type(config).model_fields, "no_option"):
        with pytest.raises(vitrim.VitrimError, match="options do not change once they are made"):
            setattr(config, key, 3)
        with pytest.raises(vitrim.VitrimError, match="options do not change"):
            delattr(config, key)
    assert config.describe() == before
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config.model_copy() == config


def parse_or_message(text: str) -> vitrim.MethodConfig | str:
    try:
        return parse_method(text)
    except vitrim.VitrimError as error:
        return str(error)


options = st.text(string.digits + 'rkbname_[]=,.-+eNul "{}', max_size=24)


@given(
    text=st.one_of(
        st.text(string.printable.strip(), max_size=24),
        st.builds("{}:{}".format, st.sampled_from(["tome", "atm", "evit", "l1", "none"]), options),
        st.builds("{}={}".format, st.sampled_from(["tome:r", "topk:blocks", "topk:keep_rate", "atm:alpha"]), options),
    )
)
def test_any_text_is_a_method_or_one_line(text: str) -> None:
    outcome = parse_or_message(text)
    if isinstance(outcome, str):
        assert len(outcome) > 10
    else:
        assert parse_method(outcome.describe()) == outcome


# ---- writing it back -----------------------------------------------------------------------------------------------

OTHERS: list[vitrim.MethodConfig] = [
    vitrim.ToMe(r=(4, 2, 1), proportional=False, kept_order="similarity"),
    vitrim.ToMe(keep_rate=0.5, blocks=(1, 2), rule="ceil_current", strict=True),
    vitrim.ToMe(r=8, keep_rate=None),
    vitrim.ATM(alpha=1.0, beta=1e-07, theta_min=-0.5, splitting_layer=None, last_block="class_token"),
    vitrim.EViT(keep_rate=1 / 3, blocks=None),
    vitrim.L2(contiguous=True, min_radius=2.5, float32_rings=True),
]


@pytest.mark.parametrize("config", [*tiny.configs(), *OTHERS], ids=lambda config: config.describe())
def test_describe_is_read_back(config: vitrim.MethodConfig) -> None:
    again = parse_method(config.describe())
    assert type(again) is type(config)
    assert again == config
    assert again.describe() == config.describe()


@pytest.mark.parametrize("name", sorted(methods()))
def test_every_option_spelt_out_is_read_back(name: str) -> None:
    config = methods()[name](**dict(methods()[name]()))  # None among them
    assert config.describe().count("=") >= 3
    assert parse_method(config.describe()) == config


def test_only_options_that_were_given_are_written() -> None:
    assert vitrim.ToMe().describe() == "tome"
    assert vitrim.ToMe(r=8).describe() == "tome:r=8"  # the default, but given
    assert vitrim.ToMe(proportional=False, r=(4, 2)).describe() in (
        "tome:proportional=false,r=[4,2]",
        "tome:r=[4,2],proportional=false",
    )


# ---- the table of methods ------------------------------------------------------------------------------------------


def test_every_method_says_what_it_is() -> None:
    for name, config in methods().items():
        assert config.name == name
        assert name == name.lower()
        assert config.kind in ("none", "prune", "merge", "mixed", "soft")
        assert config.runtime <= set(config.model_fields)
        for key, option in config.model_fields.items():
            assert option.description, f"{name}: {key} has no description"
    assert list(methods()) == sorted(methods())


def test_a_second_method_of_the_same_name_is_refused() -> None:
    class Other(vitrim.MethodConfig):
        name = "tome"

    before = methods()
    for register in (vitrim.register_method, lambda kind: vitrim.register(kind)(vitrim.ScorerReducer)):
        with pytest.raises(ValueError, match=r"method 'tome' is registered twice, by .*ToMe.* and .*Other"):
            register(Other)
    assert methods() == before
    assert Other not in registry._REDUCERS


def test_a_second_host_of_the_same_class_is_refused() -> None:
    before = hosts()
    with pytest.raises(ValueError, match=r"host 'timm.*VisionTransformer' is registered twice"):
        vitrim.register_host("timm.models.vision_transformer.VisionTransformer")(Host)
    assert hosts() == before


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **files: str) -> str:
    """An importable package ``name`` with the given files."""
    (folder / name).mkdir()
    for file, text in {"__init__": "", **files}.items():
        (folder / name / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


def test_an_import_error_in_a_method_file_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = package(tmp_path, monkeypatch, "vitrim_broken", a="", b="import vitrim_needs_what_is_not_installed")
    for _ in range(2):  # it is not remembered as done
        with pytest.raises(ModuleNotFoundError, match="vitrim_needs_what_is_not_installed"):
            tables.discover(name)


def test_every_file_of_the_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = """
import vitrim

@vitrim.register_method
class Mine(vitrim.MethodConfig):
    name = "test_mine"

@vitrim.reduces(Mine)
def nothing(config, layer):
    return None
"""
    monkeypatch.setattr(registry, "_METHODS", dict(methods()))
    name = package(tmp_path, monkeypatch, "vitrim_complete", one=method, two="")
    tables.discover(name)
    assert "vitrim_complete.two" in sys.modules
    assert type(parse_method("test_mine")).__name__ == "Mine"
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, "test_mine")
    assert model(tiny.images()).shape == (2, 5)


# ---- the table of hosts --------------------------------------------------------------------------------------------


def test_hosts_are_found_over_the_classes_a_model_inherits_from() -> None:
    class Mine(VisionTransformer):
        pass

    with torch.device("meta"):
        assert host_of(Mine(**tiny.GEOMETRY)) is TimmViT
        assert host_of(VisionTransformerDistilled(**tiny.GEOMETRY)) is TimmViT


def test_a_class_that_only_shares_the_name_is_not_the_host() -> None:
    lookalike: Any = type("VisionTransformer", (nn.Module,), {"__module__": "torchvision.models.somewhere"})
    with pytest.raises(vitrim.UnsupportedModelError) as caught:
        host_of(lookalike())
    message = str(caught.value)
    assert "VisionTransformer (from torchvision.models.somewhere) is not a supported host" in message
    assert len(message) < 200


WRONG = (
    *("word", "x=y", b"bytes", None, True, 1.5, -1, 0, 10**30, float("nan"), 1j),
    *([], ["a"], [[1]], [-1], {"a": 1}, {1, 2}, range(3), object()),
)
PYDANTIC = re.compile(
    r"[Ii]nput|a valid|unable to|after validation|should|[Tt]uple|Value error|instance|string|integer"
)


@pytest.mark.parametrize("kind", {**methods(), **selectors()}.values(), ids=lambda kind: kind.name)
def test_every_wrong_kind_of_value_is_refused_in_our_own_words(kind: Any) -> None:
    for option in kind.model_fields:
        refused = []
        for value in WRONG:
            try:
                kind(**{option: value})
            except vitrim.VitrimError as error:
                refused.append(str(error))
        assert refused, f"{option} takes anything"
        for message in refused:
            assert message.startswith(f"{kind.name}: "), message
            assert not PYDANTIC.search(message), message


# ---- numbers that are none -------------------------------------------------------------------------------------------


def takes_floats(kind: Any) -> bool:
    """Whether an annotation is float, or has it somewhere in a union or a list."""
    return kind is float or any(map(takes_floats, get_args(kind)))


FLOAT_OPTIONS = [
    pytest.param(name, option, id=f"{name}-{option}")
    for name, config in methods().items()
    for option, field in config.model_fields.items()
    if takes_floats(field.annotation)
]


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999"])
@pytest.mark.parametrize(("name", "option"), FLOAT_OPTIONS)
def test_every_number_of_every_method_is_finite(name: str, option: str, value: str) -> None:
    for text in (value, f"[{value}]", f"[{value},{value}]"):
        with pytest.raises(vitrim.VitrimError, match=f"^{name}: "):
            parse_method(f"{name}:{option}={text}")
