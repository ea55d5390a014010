"""Times of the parts of a prefill and answer: tower, selection, language model, decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.selection import Choosing
from vitrim.engines.prefill import Prefill


class Stopwatch:
    """A call of a `Prefill` whose parts are timed by hooks, which cost microseconds and synchronise an accelerator.

    ``rounds``: milliseconds of every part, per call: the tower without the connector's modules in it; everything spent
    on selection; the language model on the prompt, with head; the rest; everything after the prefill.

    Example:
        >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
        >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        >>> vision = CLIPVisionConfig(**size, image_size=32, patch_size=8)
        >>> config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**size, vocab_size=50), image_token_id=1)
        >>> prefill = Prefill(LlavaForConditionalGeneration(config).eval(), text=8, new_tokens=3)
        >>> with Stopwatch(prefill, lambda: prefill(torch.zeros(1, 1, 3, 32, 32)), "cpu") as watch:
        ...     _ = watch()
        >>> sorted(watch.medians(1))
        ['decoding', 'language model', 'rest', 'selection', 'tower']
    """

    def __init__(self, model: Prefill, call: Callable[[], object], device: torch.device | str) -> None:
        self.model, self.call, self.device = model, call, torch.device(device)
        self.rounds: list[dict[str, float]] = []
        self._hooks = ExitStack()
        self._language = model.shares()["language model"][0]
        self._begun: dict[nn.Module, float] = {}
        self._spent: dict[str, float] = {}
        self._prefilled: dict[nn.Module, float] = {}

    def __enter__(self) -> Stopwatch:
        tower, connector = self.model.shares()["tower"]
        chosen = [module for module in self.model.modules() if isinstance(module, Choosing)]
        for name, modules in (
            ("tower", tower),
            ("connector", connector),
            ("selection", chosen),
            ("language model", self._language),
        ):
            for module in modules:
                self._hooks.enter_context(module.register_forward_pre_hook(self._begin))
                self._hooks.enter_context(module.register_forward_hook(partial(self._end, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def __call__(self) -> object:
        self._begun, self._prefilled = {}, {}
        self._spent = dict.fromkeys(("tower", "connector", "selection", "language model"), 0.0)
        start = self._now()
        found = self.call()
        end = self._now()
        # Decoding begins where the last module of the language model ended its first pass.
        prefilled = max(self._prefilled.values()) if self.model.new_tokens else end
        # The connector's modules inside the tower run within its time.
        tower = self._spent["tower"] - self._spent["connector"]
        parts = {"tower": tower, **{name: self._spent[name] for name in ("selection", "language model")}}
        parts["rest"] = prefilled - start - sum(parts.values())
        if self.model.new_tokens:
            parts["decoding"] = end - prefilled
        self.rounds.append({name: 1e3 * seconds for name, seconds in parts.items()})
        return found

    def medians(self, rounds: int) -> dict[str, float]:
        """Median milliseconds of every part over the last ``rounds`` calls."""
        return {name: float(np.median([each[name] for each in self.rounds[-rounds:]])) for name in self.rounds[-1]}

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # After the prefill the language model runs once for every token: that is decoding.
        if module not in self._prefilled:
            self._begun[module] = self._now()

    def _end(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if module in self._prefilled:  # decoding
            return
        now = self._now()
        self._spent[name] += now - self._begun[module]
        if name == "language model":
            self._prefilled[module] = now
