"""A vision-language model of Hugging Face in lmms-eval, with fewer image tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages
from loguru import logger
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from vitrim.core.reduce import reduce_
from vitrim.errors import VitrimError

LONGEST = 1024
"""The most tokens of an answer, where the task sets no limit."""
PASSED = ("max_new_tokens", "num_beams", "do_sample", "temperature", "top_p", "top_k", "repetition_penalty")
"""Options that a task may set and ``generate`` reads."""


class ReducedModel(lmms):
    """``--model vitrim --model_args pretrained=...,select=...``: answers of any model that `vitrim.reduce_` takes.

    Its processor must have a chat template. Without method and selector it is the model as it is: the baseline.

    Args:
        pretrained: a folder or a name on the Hub.
        select, method: as of `vitrim.reduce_`. A text with commas needs quotes: ``select="random:keep=0.5,seed=1"``.
        dtype: of the weights, such as bfloat16; auto: as they are stored.
        device: by default the first GPU, else the CPU.
        batch_size: prompts answered together.
        max_batch_size: not read; lmms-eval gives it.

    Raises:
        VitrimError: the model, the method or the selector do not fit, or there is no chat template.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str,
        select: str | None = None,
        method: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        several = self._world_size > 1
        self.device = self.accelerator.device if several or device is None else torch.device(device)
        self.batch_size = int(batch_size)
        self.processor = AutoProcessor.from_pretrained(pretrained, trust_remote_code=False)
        if not getattr(self.processor, "chat_template", None):
            raise VitrimError(f"{pretrained} has no chat template, which makes prompts of questions and images")
        self.processor.tokenizer.padding_side = "left"  # answers begin where prompts end
        model: Any = AutoModelForImageTextToText.from_pretrained(pretrained, dtype=dtype, trust_remote_code=False)
        self.model = model.to(self.device).eval()
        select, method = (None if text is None else text.strip("'\"") for text in (select, method))
        self.reduction = None
        if select is not None or method is not None:
            self.reduction = reduce_(self.model, method, compact=True, select=select)
        self.image_tokens: list[int] = []

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The answers, in the order of the requests; those of one setting of ``generate`` go in batches."""
        answers = [""] * len(requests)
        together: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            together.setdefault(repr(sorted(request.args[2].items())), []).append(place)
        progress = tqdm(total=len(requests), disable=self.rank != 0, desc="Model Responding")
        for places in together.values():
            for start in range(0, len(places), self.batch_size):
                batch = places[start : start + self.batch_size]
                how = requests[batch[0]].args[2]
                found = self.answer([self.messages(requests[place]) for place in batch], how)
                for place, answer in zip(batch, found, strict=True):
                    answers[place] = answer
                    self.cache_hook.add_partial("generate_until", (requests[place].args[0], how), answer)
                progress.update(len(batch))
        progress.close()
        if self.image_tokens:
            mean = sum(self.image_tokens) / len(self.image_tokens)
            logger.info(f"vitrim: {mean:.1f} tokens of an image on average, of {len(self.image_tokens)} images")
        return answers

    def messages(self, request: Any) -> list[dict[str, Any]]:
        """The conversation of a request, as the library's chat templates take it."""
        _, to_messages, _, document, task, split = request.args
        given = to_messages(self.task_dict[task][split][document])
        return ChatMessages(messages=given).to_hf_messages()  # type: ignore[no-any-return]

    def answer(self, conversations: Sequence[list[dict[str, Any]]], how: Mapping[str, Any]) -> list[str]:
        """The answers to some conversations; each ends before the first of the texts of ``until``."""
        given = self.processor.apply_chat_template(
            list(conversations), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
            padding=True,
        ).to(self.device, self.model.dtype)  # fmt: skip
        options = {"max_new_tokens": LONGEST, **{name: how[name] for name in PASSED if how.get(name) is not None}}
        options["do_sample"] = bool(options.get("do_sample", float(options.get("temperature", 0.0)) > 0.0))
        if not options["do_sample"]:
            options |= dict.fromkeys(("temperature", "top_p", "top_k"))
        ids = self.model.generate(**given, **options)
        if self.reduction is not None and self.holds_images(given):
            self.image_tokens += self.reduction.image_tokens
        new = ids[:, given["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        until = how.get("until") or []
        for end in [until] if isinstance(until, str) else until:
            texts = [text.split(end)[0] if end else text for text in texts]
        return [text.strip() for text in texts]

    @staticmethod
    def holds_images(given: Mapping[str, Any]) -> bool:
        """True if a prompt has images or videos."""
        return any(name.startswith("pixel_values") for name in given)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        raise VitrimError("vitrim answers questions, and gives no likelihoods: take a task with generate_until")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        raise VitrimError("vitrim answers single questions: take a task of one round")
