"""The tests that all models of transformers share, on the tiny models of this repository's own tests.

transformers' source distribution has ``tests/test_modeling_common.py`` and not the test files of its models, which say
little more than which classes and which small configuration it runs on. This file says so for the families of
``tests/tiny_hosts`` and ``tests/tiny_vlms.py``: one test class for each class of transformers. `upstream.py` runs it
where SOURCES has no test files of models; by hand, in SOURCES:

    python -m pytest -p upstream path/to/upstream_families.py
"""

from __future__ import annotations

import importlib
import inspect
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

OWN_TESTS = str(Path(__file__).parents[1] / "tests")
if OWN_TESTS not in sys.path:
    sys.path.append(OWN_TESTS)

from tiny_hosts import families, inputs  # noqa: E402
from tiny_vlms import SECOND, VLMS  # noqa: E402

MISSING = {
    "tests.exporters.test_export": "ExportTesterMixin",
    "tests.generation.test_utils": "GenerationTesterMixin",
}
"""Modules that the shared tests import and the source distribution lacks: their tests do not run."""


def shared_tests() -> type:
    """Import ``ModelTesterMixin``, with empty classes for what the source distribution lacks."""
    for name, mixin in MISSING.items():
        try:
            getattr(importlib.import_module(name), mixin)
        except (ImportError, AttributeError):
            stand_in = ModuleType(name)
            setattr(stand_in, mixin, type(mixin, (), {}))
            sys.modules[name] = stand_in
    common = importlib.import_module("tests.test_modeling_common")
    kind: type = common.ModelTesterMixin
    return kind


class TinyModel:
    """A model's own tester, for the shared tests: a configuration, inputs, and sizes to expect."""

    is_training = True
    batch_size = 2

    def __init__(self, model: nn.Module, given: dict[str, Tensor]) -> None:
        config: Any = model.config
        self.config, self.given = config, given
        self.num_hidden_layers = getattr(config, "num_hidden_layers", None)
        self.hidden_size = getattr(config, "hidden_size", None)
        self.num_attention_heads = getattr(config, "num_attention_heads", None)
        self.seq_length = self._tokens(model)

    def _tokens(self, model: nn.Module) -> int | None:
        """Tokens of the last hidden state; none where the model shows none."""
        with torch.no_grad():
            states = getattr(model(**self.given, output_hidden_states=True), "hidden_states", None)
        return states[-1].shape[1] if states else None

    def get_config(self) -> Any:
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Tensor]]:
        return self.get_config(), {name: value.clone() for name, value in self.given.items()}


def class_for(model: nn.Module, given: dict[str, Tensor]) -> type[unittest.TestCase]:
    """Make the test class of a model: the shared tests on its class and configuration."""

    def set_up(self: Any) -> None:
        self.model_tester = TinyModel(model, given)

    composite = hasattr(model.config, "text_config") or hasattr(model.config, "vision_config")
    body = {
        "all_model_classes": (type(model),),
        "test_resize_embeddings": False,
        "_is_composite": composite,
        "setUp": set_up,
    }
    return type(f"{type(model).__name__}Test", (shared_tests(), unittest.TestCase), body)


def images(model: nn.Module, host: str) -> dict[str, Tensor]:
    """Two inputs of a tiny host, under the name that its forward has for them."""
    make = inputs().get(host)
    given = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3)) if make is None else make(2)
    names = list(inspect.signature(model.forward).parameters)
    return {model.main_input_name if model.main_input_name in names else names[0]: given}


def all_classes() -> dict[str, type[unittest.TestCase]]:
    """One test class for each class of transformers among the tiny models; the first model of a class counts."""
    made: dict[str, type[unittest.TestCase]] = {}
    for further in (False, True):
        for hosts in families(further).values():
            for host, create in hosts.items():
                if not host.startswith("hf_"):
                    continue
                model = create()
                name = f"{type(model).__name__}Test"
                if name not in made:
                    made[name] = class_for(model, images(model, host))
    for name, vlm in VLMS.items():
        model = vlm.create()
        prompt = vlm.prompt([[10, 20], [30, 40]], [vlm.tokens, SECOND.get(name, vlm.tokens)])
        made.setdefault(f"{type(model).__name__}Test", class_for(model, prompt))
    return made


globals().update(all_classes())
