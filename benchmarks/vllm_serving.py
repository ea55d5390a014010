"""Requests per second of vLLM with fewer image tokens: what the prefill's MACs promise, and what the clock says.

    OMP_NUM_THREADS=2 python benchmarks/vllm_serving.py --out serving.json      # where vLLM is: `make test-vllm`
    OMP_NUM_THREADS=2 python benchmarks/vllm_serving.py --model qwen            # pages of text
    OMP_NUM_THREADS=2 python benchmarks/vllm_serving.py --part load             # servers, and requests that arrive
    OMP_NUM_THREADS=2 python benchmarks/vllm_serving.py --part memory           # of servers, over 2,000 requests

Models are untrained, in bfloat16: shapes are all that counts. `llava` is an eighth of LLaVA-1.5-7B: its widths (CLIP-L
on 336 px, a language model 4096 wide, 32,000 words), 3 of the 24 layers of its tower and 4 of the 32 of its language
model; `qwen` is a ninth of Qwen3-VL-8B, on 768 px. So tower and language model have the proportion of the real ones.
The selector alone is as dear as there, so it weighs eight or nine times as much. `small` is an eleventh of a LLaVA with
TinyLlama-1.1B, so that small machines answer some requests per second.

There are always two of vLLM: without the plugin, which is dense, and with it; there, requests choose their settings.
All settings are asked in turn, in another order in every round. "faster" is the median of the ratio to dense within a
round, with its quartiles; "kept" is that over what MACs promise. Those are of tower, connector, selection and language
model, attention included, of a prompt's prefill (`vitrim profile` counts the same).

* `engines`, in this process: one request by itself, whose answer of one token is the time to first token; then some at
  once, with answers of ``--answer`` tokens. Every image is new, so no cache answers.
* `load`: servers, asked by vLLM's own `bench serve`, and requests that arrive as a Poisson process: eight times as many
  as dense answers, of which so many are in flight; then 0.8 times, all in flight. Half of them ask about one of 8
  images again. Caches are off (of prompts, of processed images and so of embeddings), then on; the promise is of off.
* `memory`: of all processes of a server (shared pages by halves) after every 100 requests with new images and all
  settings in turn, with caches so small that they are full after 200.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import io
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from script import Row, from_shell, spread, table, write_json
from vitrim import parse_selector
from vitrim.data import to_tensor
from vitrim.engines.copies import reduced_copy
from vitrim.engines.machine import processor
from vitrim.engines.macs import count_macs
from vitrim.engines.prefill import Prefill
from vitrim.measure.latency import paired_speedup, summarise
from vlm_prefill import page

TEXT_TOKENS = 32
WORDS = 160
"""Words w4, w5, ... of the tokenizer are below; special tokens follow."""
DENSE = "dense"


class Shape(NamedTuple):
    """A model of random weights: widths and layers of its parts, pixels of its images' sides, settings to compare."""

    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    side: int
    select: Sequence[str]

    @property
    def packed(self) -> bool:
        """True of Qwen3-VL, whose images may have any size, and are pages here; else it is LLaVA, whose are noise."""
        return "depth" in self.vision


def clip(layers: int) -> dict[str, Any]:
    widths = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return {**widths, "num_hidden_layers": layers, "image_size": 336, "patch_size": 14}


def packed(width: int, inner: int, layers: int, heads: int, out: int) -> dict[str, Any]:
    widths = {"hidden_size": width, "intermediate_size": inner, "depth": layers, "num_heads": heads}
    return {**widths, "patch_size": 16, "out_hidden_size": out, "deepstack_visual_indexes": [0]}


def language(width: int, inner: int, layers: int, heads: int, keys: int) -> dict[str, Any]:
    widths = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 128}
    return {**widths, "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": 32000, "pad_token_id": 0}


POOL, DIVPRUNE, RESIZE = (f"{name}:keep=0.25" for name in ("pool", "divprune", "resize"))
OTHERS = ("random:keep=0.25", "otprune:keep=0.25", "vidcom2:keep=0.25", "scope:saliency=none,keep=0.25")
SHAPES = {
    "llava": Shape(clip(3), language(4096, 11008, 4, 32, 32), 336, (POOL, DIVPRUNE, *OTHERS)),
    "qwen": Shape(
        packed(1152, 4304, 3, 16, 4096),
        language(4096, 12288, 4, 32, 8),
        768,
        (POOL, DIVPRUNE, RESIZE, "pixelprune"),
    ),
    "small": Shape(clip(2), {**language(2048, 5632, 2, 32, 4), "head_dim": 64}, 336, (POOL, DIVPRUNE)),
    "tiny": Shape(
        packed(64, 128, 2, 2, 64),
        language(64, 128, 2, 2, 2),
        128,
        ("none", DIVPRUNE, "random:keep=0.5", RESIZE, "pixelprune"),
    ),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine's model is to stand in this process, where its parts are timed
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VITRIM_SELECT": "",  # of the user
    "VITRIM_SELECT_ALLOWED": "",
    "HF_HUB_OFFLINE": "1",
}
CHOOSING = {"vitrim": {"allowed": ["any"]}}
PARTS = ("images", "tower", "selection", "language")
"""Timed parts: preparing a request's image, tower and connector, the rest of the embeddings, the language model."""
REPEATED, POPULAR = 0.5, 8
"""Share of a server's requests that ask about an image again, and the number of such images."""
ABOVE, BELOW = 8, 0.8
"""Rates of arrival over what dense answers."""
CACHES = {"off": {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}, "on": dict[str, Any]()}
BLOCK = 32
"""Tokens of a block of the prefix cache; on a CPU usually 128, on GPUs 16."""


# ---- the model -------------------------------------------------------------------------------------------------------


def configuration(shape: Shape) -> Any:
    """All layers of LLaVA's tower are used, in vLLM and transformers alike."""
    if shape.packed:
        names = ("image", "video", "vision_start", "vision_end")
        rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6, "mrope_interleaved": True}
        return transformers.Qwen3VLConfig(
            vision_config=shape.vision,
            text_config={**shape.text, "rope_parameters": rope},
            **{f"{name}_token_id": WORDS + number for number, name in enumerate(names)},
            architectures=["Qwen3VLForConditionalGeneration"],
            dtype="bfloat16",
        )
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**shape.vision),
        text_config=transformers.LlamaConfig(**shape.text, max_position_embeddings=4096),
        image_token_index=WORDS,
        image_seq_length=(shape.side // shape.vision["patch_size"]) ** 2,
        vision_feature_layer=-1,
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
    )


def write(shape: Shape, place: Path) -> None:
    """A folder that vLLM starts from, without weights."""
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"] if shape.packed else ["<image>"]
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, WORDS))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens(names[4:])  # Qwen's loads as a tokenizer of another kind, which keeps such words
    made.add_special_tokens(special)
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=special
    )
    side, patch = shape.side, shape.vision["patch_size"]
    whole: Any
    if shape.packed:
        limits = {"size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": side**2}, "patch_size": patch}
        images = transformers.Qwen2VLImageProcessor(**limits, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        whole = transformers.Qwen3VLProcessor(images, words, transformers.Qwen3VLVideoProcessor(**limits))
    else:
        images = transformers.CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
        how = {"patch_size": patch, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        whole = transformers.LlavaProcessor(images, words, **how)
    whole.save_pretrained(place)
    configuration(shape).save_pretrained(place)
    (place / "template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def drawn(shape: Shape, number: int, seed: int) -> list[Image.Image]:
    """Images, each another: of noise, or a page whose first cell is noise, so that as many cells differ in each."""
    noise, cell = np.random.default_rng(seed), 2 * shape.vision["patch_size"]
    side = cell if shape.packed else shape.side
    found = [Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(number)]
    if not shape.packed:
        return found
    whole = page(shape.side // cell, shape.side // cell, cell)
    pages = [whole.copy() for _ in found]
    for own, stamp in zip(pages, found, strict=True):
        own.paste(stamp)
    return pages


def question(shape: Shape, seed: float) -> str:
    """Words of a prompt that has `TEXT_TOKENS` besides the image's own."""
    words = random.Random(seed).choices(range(4, WORDS), k=TEXT_TOKENS - (2 if shape.packed else 0))
    return " ".join(f"w{number}" for number in words)


@torch.inference_mode()
def promised(shape: Shape, selectors: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Image tokens and how many times fewer MACs the prefill has, by setting, of which dense is the first."""
    model = transformers.AutoModelForImageTextToText.from_config(configuration(shape), dtype=torch.bfloat16).eval()
    pixels = (2 * to_tensor(drawn(shape, 1, 0)[0]) - 1).to(torch.bfloat16)[None, None]
    prefill = Prefill(model, text=TEXT_TOKENS, select=selectors[0])
    side = shape.side // shape.vision["patch_size"] // (2 if shape.packed else 1)
    prefill.shape, prefill.places = tuple(pixels.shape[1:]), side**2
    dense, found = count_macs(prefill, pixels).total, {DENSE: (side**2, 1.0)}  # not reduced: its selector is not asked
    for select in selectors:
        prefill.select = parse_selector(select)
        copy = reduced_copy(prefill, "none")
        macs = count_macs(copy, pixels).total
        found[select] = int(copy.image_tokens(pixels)), dense / macs
    return found


def usual(shape: Shape, at_once: int, batched: int) -> dict[str, Any]:
    """Options of vLLM, with room for the prompts of all requests."""
    text = shape.text
    token = 4 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]
    return {
        "load_format": "dummy",
        "max_model_len": 1024,
        "max_num_seqs": at_once,
        "max_num_batched_tokens": batched,
        "kv_cache_memory_bytes": (at_once + 1) * 1024 * token,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 1, **({"video": 0} if shape.packed else {})},
    }


def against(dense: Sequence[float], own: Sequence[float], promise: float) -> dict[str, str]:
    """Columns of the ratio of times within rounds."""
    faster = paired_speedup(dense, own)
    return {"faster": spread(faster.median, faster.q1, faster.q3), "kept": f"{faster.median / promise:.2f}"}


# ---- engines ---------------------------------------------------------------------------------------------------------


class Parts:
    """Seconds that parts of an engine took since they were last asked for."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def around(self, part: str, call: Callable[..., Any], *inner: str) -> Callable[..., Any]:
        """``call``, timed as a ``part``, without what parts inside it took."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, start = sum(self.seconds[name] for name in inner), time.perf_counter()
            result = call(*args, **kwargs)
            took = time.perf_counter() - start
            self.seconds[part] += took - (sum(self.seconds[name] for name in inner) - before)
            return result

        return timed

    def watch(self, model: Any) -> None:
        """Time the parts of a model of vLLM."""
        for name in ("vision_tower", "multi_modal_projector", "visual"):
            if hasattr(model, name):
                module = getattr(model, name)
                module.forward = self.around("tower", module.forward)
        model.embed_multimodal = self.around("selection", model.embed_multimodal, "tower")
        language = model.language_model.model
        language.forward = self.around("language", language.forward)


class Engine:
    """vLLM in this process."""

    def __init__(self, place: Path, dense: bool, options: Mapping[str, Any]) -> None:
        from vllm import LLM

        self.parts = Parts()
        self.llm = LLM(str(place), **options, **({} if dense else {"additional_config": CHOOSING}))
        self.llm.apply_model(self.parts.watch)

    def ask(self, text: str, images: Sequence[Image.Image], select: str | None, answer: int) -> dict[str, float]:
        """Seconds of each part and ``all`` together, and the ``tokens`` of a prompt."""
        from vllm import SamplingParams
        from vllm.multimodal.processing import BaseMultiModalProcessor

        more = {"mm_processor_kwargs": {"vitrim_select": select}} if select else {}
        prompts = [{"prompt": text, "multi_modal_data": {"image": image}, **more} for image in images]
        how = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        own = BaseMultiModalProcessor.apply
        BaseMultiModalProcessor.apply = self.parts.around("images", own)
        self.parts.seconds.clear()
        start = time.perf_counter()
        try:
            found = self.llm.generate(prompts, how, use_tqdm=False)
        finally:
            BaseMultiModalProcessor.apply = own
        took, seconds = time.perf_counter() - start, self.parts.seconds
        assert all(len(request.outputs[0].token_ids) == answer for request in found)
        rest = took - sum(seconds.values())
        return {**seconds, "rest": rest, "all": took, "tokens": len(found[0].prompt_token_ids)}


def engines(shape: Shape, place: Path, selectors: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """A row for each setting."""
    promises, at_once = promised(shape, selectors), options.requests
    made = {dense: Engine(place, dense, usual(shape, at_once, options.batched)) for dense in (True, False)}
    alone, some = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
    text = f"{'<|vision_start|><|image_pad|><|vision_end|>' if shape.packed else '<image>'} {question(shape, 0)}"
    for turn in range(-1, options.rounds):  # the first one warms up
        images = drawn(shape, 1 + at_once, turn + 1)
        for name in random.Random(turn).sample([*promises], len(promises)):
            engine, select = made[name == DENSE], None if name == DENSE else name
            told = engine.ask(text, images[:1], select, 1), engine.ask(text, images[1:], select, options.answer)
            assert told[0]["tokens"] == TEXT_TOKENS + promises[name][0], name
            if turn >= 0:
                alone[name].append(1000 * told[0]["all"])
                some[name].append({part: 1000 * took / at_once for part, took in told[1].items()})
    rows = []
    each = {name: [one["all"] for one in own] for name, own in some.items()}
    for name, (count, promise) in promises.items():
        first, sooner = summarise(alone[name]), paired_speedup(alone[DENSE], alone[name])
        shares = {part: statistics.median(one.get(part, 0.0) for one in some[name]) for part in (*PARTS, "rest")}
        rows.append(
            {
                "setting": name,
                "image tokens": count,
                "promised": f"{promise:.2f}",
                "requests/s": f"{1000 / statistics.median(each[name]):.2f}",
                **against(each[DENSE], each[name], promise),
                "first token, ms": f"{first.p50_ms:.0f} ± {first.iqr_ms:.0f}",
                "sooner": spread(sooner.median, sooner.q1, sooner.q3),
                **{f"{part}, ms": f"{took:.0f}" for part, took in shares.items()},
            }
        )
    del made, engine
    gc.collect()
    return rows


# ---- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(place: Path, dense: bool, options: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The address of a server, and its process; it ends with the block, and so do its children."""
    if not dense:
        options = {**options, "additional_config": CHOOSING, "trust_request_mm_kwargs": True}
    words = [
        f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        + ("" if isinstance(value, bool) else f"={json.dumps(value) if isinstance(value, dict) else value}")
        for name, value in options.items()
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` of the CPU build looks for a distribution called vllm, and ends: it is called vllm-cpu
    start = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(place), *words]
    more = ["--served-model-name", "one", "--chat-template", str(place / "template.jinja"), "--port", str(port)]
    address, log = f"http://127.0.0.1:{port}", place / f"{port}.log"
    with log.open("w") as out:
        run = subprocess.Popen([*start, *more], stdout=out, stderr=out, process_group=0)
        try:
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                if run.poll() is not None:
                    raise RuntimeError(log.read_text()[-3000:])
                time.sleep(1)
            yield address, run.pid
        finally:
            run.terminate()
            with suppress(subprocess.TimeoutExpired):
                run.wait(timeout=60)
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def coming(
    shape: Shape, number: int, seed: int, settings: Sequence[str | None], answer: int, repeated: float = 0.0
) -> list[Any]:
    """Requests for vLLM's `bench serve`, with ``settings`` in turn; a share asks about an image again."""
    from vllm.benchmarks.datasets import SampleRequest

    draw, found = random.Random(seed), []
    images = [content(image) for image in drawn(shape, POPULAR + number, seed)]
    for place in range(number):
        image = images[draw.randrange(POPULAR) if draw.random() < repeated else POPULAR + place]
        select = settings[place % len(settings)]
        more = {"mm_processor_kwargs": {"vitrim_select": select}} if select else None
        found.append(SampleRequest(question(shape, draw.random()), TEXT_TOKENS, answer, image, request_overrides=more))
    return found


def content(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def bench(address: str, requests: Sequence[Any], rate: float, at_once: int | None, seed: int) -> dict[str, Any]:
    """The report of vLLM's `bench serve` on requests that arrive as a Poisson process, all of them answered."""
    from vllm.benchmarks.serve import TaskType, benchmark

    np.random.seed(seed)  # of the arrivals
    with redirect_stdout(io.StringIO()):
        found: dict[str, Any] = asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type="openai-chat",
                api_url=f"{address}/v1/chat/completions",
                base_url=address,
                model_id="one",
                model_name="one",
                tokenizer=None,
                input_requests=[*requests],
                logprobs=None,
                request_rate=rate,
                burstiness=1.0,
                disable_tqdm=True,
                num_warmups=0,
                profile=False,
                selected_percentile_metrics=[],
                selected_percentiles=[],
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=at_once,
                lora_modules=None,
                extra_headers=None,
                extra_body={"temperature": 0},
                ready_check_timeout_sec=0,
            )
        )
    assert not found["failed"], next(error for error in found["errors"] if error)
    return found


def load(shape: Shape, place: Path, selectors: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """A row for each setting, with and without caches, for every number of requests in flight."""
    promises, most = promised(shape, selectors), max(options.flight)
    shared, rows, seed = {**usual(shape, most, options.batched), "block_size": BLOCK}, [], 0
    for cache, own in CACHES.items():
        found, rate = defaultdict[tuple[int | None, str], list[dict[str, Any]]](list), math.inf
        with ExitStack() as stack:
            of = {dense: stack.enter_context(serving(place, dense, {**shared, **own}))[0] for dense in (True, False)}
            for turn in range(-1, options.rounds):  # the first one warms up
                for flight in (*options.flight, None) if turn >= 0 else [most]:
                    seed += 1
                    for name in random.Random(seed).sample([*promises], len(promises)):
                        chosen, number = [None if name == DENSE else name], 8 + 2 * (flight or most)
                        asked = coming(shape, number, seed, chosen, options.answer, REPEATED)
                        told = bench(of[name == DENSE], asked, rate * (ABOVE if flight else BELOW), flight, seed)
                        assert set(told["input_lens"]) == {TEXT_TOKENS + promises[name][0]}, name
                        if turn >= 0:
                            found[flight, name].append(told)
                        if name == DENSE:
                            latest = told["request_throughput"]
                    rate = latest if flight == most else rate
        for flight, name in product((*options.flight, None), promises):
            waits = [1000 * wait for one in found[flight, name] for wait in one["ttfts"]]
            dense, each = ([1 / one["request_throughput"] for one in found[flight, key]] for key in (DENSE, name))
            ratios = against(dense, each, promises[name][1])
            rows.append(
                {
                    "caches": cache,
                    "in flight": flight or f"{BELOW} of dense",
                    "setting": name,
                    "requests/s": f"{1 / statistics.median(each):.2f}",
                    "faster": ratios["faster"] if flight else "",
                    "kept": ratios["kept"] if flight and cache == "off" else "",
                    "first token, ms: p50": f"{np.percentile(waits, 50):.0f}",
                    "p99": f"{np.percentile(waits, 99):.0f}",
                    "requests": len(waits),
                }
            )
    return rows


def memory(shape: Shape, place: Path, selectors: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """MiB of a server's processes after every 100 requests, and how they grow after the first 200."""
    import psutil

    at_once, held = 8, dict[str, list[float]]()
    small = {**usual(shape, at_once, 512), "block_size": BLOCK, "mm_processor_cache_gb": 0.02}
    for dense, settings in ((True, [None]), (False, selectors)):
        own = held[DENSE if dense else "settings in turn"] = []
        with serving(place, dense, small) as (address, process):
            for turn in range(options.number // 100):
                bench(address, coming(shape, 100, turn, settings, 1), math.inf, at_once, turn)
                run = psutil.Process(process)
                every = [run, *run.children(recursive=True)]
                own.append(sum(one.memory_full_info().pss for one in every) / 2**20)
    slopes = {name: f"{10 * np.polyfit(range(len(own) - 2), own[2:], 1)[0]:+.1f}" for name, own in held.items()}
    rows: list[Row] = [
        {"requests": 100 * (turn + 1), **{name: f"{own[turn]:.0f}" for name, own in held.items()}}
        for turn in range(options.number // 100)
    ]
    return [*rows, {"requests": "per 1,000 after 200", **slopes}]


RUNS = {"engines": (engines, "llava"), "load": (load, "small"), "memory": (memory, "tiny")}
"""The function that makes the rows of each part, and its model if none is named."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=RUNS, default="engines")
    parser.add_argument("--model", choices=SHAPES, help="default: llava for engines, small for load, tiny for memory")
    parser.add_argument("--select", action="append", help="a setting beside dense; default: those of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="at once, of engines")
    parser.add_argument("--answer", type=int, default=1, help="tokens of each of these, and of a server's answers")
    parser.add_argument("--batched", type=int, default=2432, help="tokens of a step, at most: 4 prompts of 608")
    parser.add_argument("--flight", type=int, nargs="+", default=[1, 8, 32], help="requests in flight, of servers")
    parser.add_argument("--number", type=int, default=2000, help="of requests whose memory is watched")
    parser.add_argument("--out", help="a JSON file of all rows")
    options = parser.parse_args()
    if options.number < 400:
        parser.error("--number is at least 400, of which 200 warm up")
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end, too
    run, model = RUNS[options.part]
    shape = SHAPES[options.model or model]
    with tempfile.TemporaryDirectory() as place:
        write(shape, Path(place))
        rows = run(shape, Path(place), options.select or shape.select, options)
    print(table(rows[0], (row.values() for row in rows)))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    machine = {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    write_json(options.out, {"settings": settings, **machine, "rows": rows})


if __name__ == "__main__":
    from_shell(main)
