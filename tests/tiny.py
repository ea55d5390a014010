"""Tiny hosts and the method settings that the contract tests run over, and what is done alike with all hosts.

Hosts: every family in `tiny_hosts`. Methods: every registered one with settings that reduce a 6 x 6 grid; a new method
is tested with its defaults without being named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import vitrim
from full_matrix import FULL_MATRIX
from tiny_hosts import Hosts, families, inputs
from tiny_hosts.timm_vit import GEOMETRY, vit
from vitrim.core.registry import host_of, make_method, make_reducer, methods

__all__ = ["GEOMETRY", "vit"]

T, U = TypeVar("T"), TypeVar("U")

FAMILIES = families()
HOSTS = Hosts({name: create for hosts in FAMILIES.values() for name, create in hosts.items()})
INPUTS = inputs()
FURTHER = Hosts({name: create for hosts in families(further=True).values() for name, create in hosts.items()})
"""Hosts on which `make test` runs a few methods (`tests/hosts/test_further_hosts.py`)."""
PLAIN = [next(iter(hosts)) for hosts in FAMILIES.values()]
"""One host of each family."""
REPRESENTATIVE = ("evit", "tome", "mctf", "ats", "cropr", "patchmerger")
"""A few methods of mechanisms that a host can break: selection at the query, with a fused token; merging; fresh values;
counts that differ per image; a bank; soft tokens. Tested on every host."""
FEW = ("topk", "tome", "mctf", "cropr")
"""Those that the slow tests run on one host of each library."""


def one_of_each_library() -> list[str]:
    """The plain host of the family ``LIBRARY_vit``, or of any other if there is none: every method is tested on it."""
    by_name = sorted(FAMILIES, key=lambda family: not family.endswith("_vit"))
    found: dict[str, str] = {}
    for family in by_name:
        found.setdefault(family.partition("_")[0], next(iter(FAMILIES[family])))
    return list(found.values())


LIBRARIES = one_of_each_library()
OWN_HEAD = ("hf_eomt", "hf_eomt_dinov3")
"""Hosts that are dense models themselves: no other head fits on them."""
BACKBONES = [name for name in HOSTS if name not in OWN_HEAD]
PLAIN_BACKBONES = [name for name in PLAIN if name not in OWN_HEAD]

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "a_vit": [{"gate_scale": 1.0, "gate_center": 1.0}],
    "diffrate": [{"r": 4}, {"prune_kept": [33, 30, 27, 24], "merge_kept": [31, 28, 27, 20], "discount_sizes": True}],
    "tofu": [{"keep_rate": 0.8}, {"keep_rate": 0.8, "prune_until": -1, "norm_of": "destination"}],
    "pitome": [{"keep_rate": 0.8}, {"keep_rate": 0.8, "protect": "always"}],
    "mctf": [
        {"r": 4},
        {"r": 0.2, "attention_map": "shared"},
        {"r": 4, "attention": "precise"},
        {"r": 4, "attention": "after"},
    ],
    "tome": [{"r": 4}, {"keep_rate": 0.6}],
    "algm": [{"threshold": 0.5}],
    "atm": [
        {"alpha": 0.9, "beta": 0.2, "theta_min": 0.1},
        {"alpha": 0.9, "beta": 0.2, "theta_min": 0.1, "granularity": "image"},
    ],
    "pixelprune": [{"tau": 0.57, "distance": "mae", "std": 0.5}],
    "atc": [{"keep_rate": 0.6}, {"keep_rate": 0.6, "linkage": "single"}],
    "ppt": [{"r": 4, "spread": 0.1}, {"r": 4, "threshold": 0.0}],
    "saint": [{"threshold": 0.3}, {"threshold": 0.3, "r": [6, 4]}],
    "vid_tldr": [{"r": 6, "blocks": [0, 2]}],
    "evit": [{"keep_rate": 0.6}, {"keep_rate": 0.6, "fuse_token": False}],
    "evo_vit": [{}, {"blocks": [1, 2, 3], "fast_update": True}],
}


def configs() -> list[vitrim.MethodConfig]:
    """Every registered method, with the settings above or its defaults."""
    return [make_method(name, **options) for name in methods() for options in SETTINGS.get(name, [{}])]


def static_configs() -> list[vitrim.MethodConfig]:
    """Those that are one graph: neither counts nor steps depend on the images."""
    return [config for config in configs() if config.obstacle() is None and not config.is_adaptive()]


def first_settings(chosen: Iterable[vitrim.MethodConfig]) -> list[vitrim.MethodConfig]:
    """The first setting of every method."""
    return list({config.name: config for config in reversed(list(chosen))}.values())[::-1]


def diagonal(rows: Sequence[T], columns: Sequence[U], number: int = 0) -> list[tuple[T, U]]:
    """Pairs of a row and a column that meet every row twice or more, and every column.

    The diagonals of two tests that differ in their ``number`` have no pair in common, until it has gone through half of
    the shorter side.
    """
    step = max(min(len(rows), len(columns)) // 2, 1)
    return [
        (row, column) for i, row in enumerate(rows) for j, column in enumerate(columns) if (i + j + number) % step == 0
    ]


def cases(pairs: Iterable[tuple[str, vitrim.MethodConfig]]) -> list[Any]:
    """(host, config) parameters, each once."""
    named = {f"{host}-{config.describe()}": (host, config) for host, config in pairs}
    return [pytest.param(*pair, id=name) for name, pair in named.items()]


def matrix(
    chosen: list[vitrim.MethodConfig],
    hosts: Iterable[str],
    thorough: Iterable[str],
    others: Iterable[str] = REPRESENTATIVE,
    once: Iterable[str] = (),
    variants: Iterable[str] | None = None,
    full: Iterable[str] = HOSTS,
) -> list[Any]:
    """(host, config) parameters: every setting of every method on the ``thorough`` hosts, the first setting of every
    method on those of ``once``, that of the methods called ``others`` on the rest of ``hosts``, or of those called
    ``variants`` where the host is not the plain one of a library. Under ``VITRIM_FULL_MATRIX=1`` also a diagonal of all
    settings and the hosts of ``full``."""
    first = first_settings(chosen)

    def configs_on(host: str) -> list[vitrim.MethodConfig]:
        if host in thorough:
            return chosen
        if host in once:
            return first
        names = others if variants is None or host in LIBRARIES else variants
        return [config for config in first if config.name in names]

    short = [(host, config) for host in hosts for config in configs_on(host)]
    return cases([*short, *(diagonal(list(full), chosen) if FULL_MATRIX else [])])


AVERAGING = ("hf_beit", "hf_dinov2", "hf_dinov3", "hf_eomt", "hf_siglip")
"""Plain hosts whose head averages patches: what `fits` refuses there, `covering` leaves out."""


def covering(number: int, hosts: Iterable[str] = PLAIN) -> list[tuple[str, vitrim.MethodConfig]]:
    """Pairs for the test ``number``: a row of a covering array over methods, hosts and tests.

    Every method runs once in each test, and so does, twice or more, every host of ``hosts``; from one test to the next
    each method moves on to another host. Ten tests so have most pairs of a method and a host, where every test on all
    pairs would take as long as the rest of the suite.
    """
    rows: list[tuple[str, vitrim.MethodConfig]] = []
    used = Counter[str]()
    for place, config in enumerate(first_settings(configs())):
        choice = [host for host in hosts if host not in AVERAGING or _suits_averages(config, host)]
        first = (place + 3 * number) % len(choice)
        host = min(choice[first:] + choice[:first], key=used.__getitem__)  # of those with the fewest methods, the first
        used[host] += 1
        rows.append((host, config))
    return rows


def _suits_averages(config: vitrim.MethodConfig, host: str) -> bool:
    if host in OWN_HEAD and config.kind == "soft":
        return False
    return not (config.kind == "prune" and config.is_adaptive()) and (config.kind != "mixed" or host in OWN_HEAD)


def fits(config: vitrim.MethodConfig, model: nn.Module) -> vitrim.MethodConfig:
    """``config``, with the documented substitute where it needs a class token and ``model`` has none.

    Skips the test where the method cannot serve the model: counts that differ per image by pruning, on a head that
    pools patches, are refused (`tests/core/test_reduce.py`).
    """
    facts = host_of(model).facts(model)
    if config.kind == "soft" and facts.dense:
        pytest.skip("refused: a soft token belongs to no place")
    if config.kind == "prune" and config.is_adaptive() and facts.averages_patches:
        pytest.skip("refused: the head would average padding")
    if config.kind == "mixed" and facts.averages_patches and not facts.dense:
        pytest.skip("refused: the head would miss pruned tokens and count merged ones once")
    if config.needs().class_token and not facts.has_class_token:
        return config.model_copy(update={"score": "column_mean"})
    return config


def reducer(config: vitrim.MethodConfig, layer: vitrim.Layer) -> Any:
    """The reducer of one layer of a model that is planned for ``config``."""
    return make_reducer(config, replace(layer, amounts=tuple(config.amounts(layer.num_layers))))


# ---- what is done alike with all hosts -------------------------------------------------------------------------------


def blocks(model: nn.Module) -> list[Any]:
    return host_of(model).blocks(model)


def drop_last_block(model: nn.Module) -> None:
    """Makes a model that is not reduced one block shallower."""
    last = blocks(model)[-1]
    holder = next(module for module in model.modules() if last in module.children())
    del holder[list(holder).index(last)]  # type: ignore[call-overload]
    if hasattr(model, "num_hidden_layers"):
        model.num_hidden_layers -= 1  # EoMT counts its layers itself
    assert last not in blocks(model)


TRACED_BLOCKS = {"cropr": 3, "evo_vit": 3, "kmedoids": 4}
"""Methods that need more than two blocks: two act between the first and the last, one must not act in the first."""


def traceable(host: str, config: vitrim.MethodConfig) -> nn.Module:
    """A host with as few of its four blocks as the method takes: tracing each takes a second or more.

    With all four where the settings name blocks or say an amount for each.
    """
    model = HOSTS[host]()
    each = any(isinstance(getattr(config, option), list | tuple) for option in config.model_fields_set)
    while not each and len(blocks(model)) > TRACED_BLOCKS.get(config.name, 2):
        drop_last_block(model)
    counts = fits(config, model).counts(36, len(blocks(model)))
    assert counts is None or config.kind == "none" or min(counts) < 36  # it does reduce
    return model


def is_classifier(host: str) -> bool:
    """Whether it gives logits rather than features."""
    with torch.no_grad():
        output = logits(HOSTS[host]()(images()))
    return isinstance(output, Tensor) and output.shape == (2, GEOMETRY["num_classes"])


def num_behind(model: nn.Module) -> int:
    """Prefix tokens that the host itself has behind the patches: YOLOS's detection tokens."""
    return num_prefix(model) - 1 if host_of(model).name == "transformers YOLOS" else 0


def num_prefix(model: nn.Module) -> int:
    return host_of(model).facts(model).num_prefix


def run(model: Any, images: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Logits, or whatever else the model gives; the random method draws the same in every run that is compared."""
    torch.manual_seed(5)
    return logits(model(images))


def logits(output: Any) -> Tensor | tuple[Tensor, ...]:
    """Of any library's output; also of an exported or compiled model, which has no host."""
    if isinstance(output, Tensor | tuple):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def checkpoints(model: Any) -> Callable[[], None]:
    """Switches the host's own gradient checkpointing on. Hugging Face has it in training only: the model then is."""
    if hasattr(model, "set_grad_checkpointing"):
        return lambda: model.set_grad_checkpointing(True)
    if getattr(model, "supports_gradient_checkpointing", False):
        model.train()
        return model.gradient_checkpointing_enable
    pytest.skip("this host has no gradient checkpointing")


def shaken(model: nn.Module) -> nn.Module:
    """``model`` with norms, biases and layer scales that are far from those of a fresh one, as after training."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def dense_tokens(model: Any, images: Tensor) -> list[Tensor]:
    """(B, N0, C) after every block, through the host's own call for dense features; the prefix in front."""
    torch.manual_seed(5)
    if hasattr(model, "forward_intermediates"):
        # without a prefix most of timm's models return bare patches when asked for it, one raises UnboundLocalError
        asked = num_prefix(model) > 0
        _, layers = model.forward_intermediates(images, output_fmt="NLC", return_prefix_tokens=asked)
        return [layer if isinstance(layer, Tensor) else torch.cat(layer[::-1], 1) for layer in layers]
    if hasattr(model, "config"):
        layers = model(images, output_hidden_states=True).hidden_states[1 : 1 + len(blocks(model))]
        patches = layers[0].shape[1] - num_behind(model)
        return [torch.cat([x[:, :1], x[:, patches:], x[:, 1:patches]], dim=1) for x in layers]
    pytest.skip("this library has no call for dense features")


def given(host: str, batch: int = 2) -> Tensor:
    """What a host takes: images, or another input."""
    return INPUTS.get(host, images)(batch)


def images(batch: int = 2, size: int = 24, seed: int = 3) -> Tensor:
    """(B, 3, size, size) noise on a coarse pattern, so that some patches are alike."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 3, 3, 3, generator=generator)
    fine = torch.randn(batch, 3, size, size, generator=generator)
    return nn.functional.interpolate(coarse, size=size) + 0.3 * fine
