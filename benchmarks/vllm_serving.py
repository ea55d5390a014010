"""Requests per second of vLLM with fewer image tokens: what the prefill's MACs promise, and what the clock says.

    OMP_NUM_THREADS=2 python benchmarks/vllm_serving.py --out serving.json      # where vLLM is: `make test-vllm`
    OMP_NUM_THREADS=2 python benchmarks/vllm_serving.py --tokens 144 --rounds 2 --requests 2

The model is an eighth of LLaVA-1.5-7B: its widths (CLIP-L on 336 px, a language model 4096 wide, 32,000 words), 3 of
the 24 layers of its tower and 4 of the 32 of its language model, in bfloat16, untrained: shapes are all that counts. So
tower and language model have the proportion of the real one. The selector alone is as dear as there, so it weighs eight
times as much.

For every number of tokens that is kept, three engines stand in one process: without a setting, `divprune`, and `pool`,
which chooses at no cost. They are asked in turn, in another order in every round: one request by itself, whose answer
of one token is the time to first token; then some at once, with answers of ``--answer`` tokens. Every image is new, so
no cache answers. "faster" is the median of the ratio to the engine without a setting within a round, with its
quartiles; "kept" is that over what MACs promise. Those are of tower, connector, selection and language model, attention
included, of a prompt's prefill (`vitrim profile` counts the same).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from script import from_shell, write_json
from vitrim.engines.copies import reduced_copy
from vitrim.engines.machine import processor
from vitrim.engines.macs import count_macs
from vitrim.engines.prefill import Prefill
from vitrim.measure.latency import paired_speedup, summarise

TEXT_TOKENS = 32
IMAGE_TOKEN = 200
DENSE = "dense"
SELECTORS = ("divprune", "pool")
LLAVA: dict[str, dict[str, Any]] = {
    "vision": {
        "hidden_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 336,
        "patch_size": 14,
    },
    "text": {
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is to stand in this process, where its parts are timed
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
PARTS = ("images", "tower", "selection", "language")
"""Timed parts: preparing a request's image, tower and connector, the rest of the embeddings, the language model."""


def configuration() -> Any:
    """Tower and language model of `LLAVA`; all layers of the tower are used, in vLLM and transformers alike."""
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**LLAVA["vision"]),
        text_config=transformers.LlamaConfig(**LLAVA["text"], pad_token_id=0),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=(LLAVA["vision"]["image_size"] // LLAVA["vision"]["patch_size"]) ** 2,
        vision_feature_layer=-1,
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
    )


def write(place: Path) -> None:
    """A folder that vLLM starts from, without weights: words are w0, w1, ... ."""
    side = LLAVA["vision"]["image_size"]
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(IMAGE_TOKEN - 4))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<image>"])
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=["<image>"]
    )
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        words,
        patch_size=LLAVA["vision"]["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(place)
    configuration().save_pretrained(place)


@torch.inference_mode()
def promised(selectors: Iterable[str]) -> dict[str, tuple[int, float]]:
    """Image tokens and how many times fewer MACs the prefill has, by selector."""
    model = transformers.AutoModelForImageTextToText.from_config(configuration(), dtype=torch.bfloat16).eval()
    images = torch.randn(1, 1, 3, *[LLAVA["vision"]["image_size"]] * 2, dtype=torch.bfloat16)
    macs, counts = {}, {}
    for select in (None, *selectors):
        prefill = Prefill(model, text=TEXT_TOKENS, select=select)
        counted = prefill if select is None else reduced_copy(prefill, "none")
        macs[select] = count_macs(counted, images).total
        counts[select] = int(counted.image_tokens(images))
    return {select or DENSE: (counts[select], macs[None] / macs[select]) for select in macs}


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
        tower, language = model.vision_tower, model.language_model.model
        for module in (tower, model.multi_modal_projector):
            module.forward = self.around("tower", module.forward)
        model.embed_multimodal = self.around("selection", model.embed_multimodal, "tower")
        language.forward = self.around("language", language.forward)


class Engine:
    """vLLM in this process.

    Args:
        place: the model's folder.
        select: the setting, or `DENSE`.
        at_once: requests that run together.
        batched: tokens of a step, at most.
    """

    def __init__(self, place: Path, select: str, at_once: int, batched: int) -> None:
        from vllm import LLM

        self.parts, self.seed = Parts(), 0
        setting = {} if select == DENSE else {"additional_config": {"vitrim": {"select": select}}}
        self.llm = LLM(
            str(place),
            load_format="dummy",
            max_model_len=1024,
            max_num_seqs=at_once,
            max_num_batched_tokens=batched,
            kv_cache_memory_bytes=at_once * 1024 * 65536,  # of a token: 4 layers, keys and values, 4096 wide, 2 bytes
            enforce_eager=True,
            limit_mm_per_prompt={"image": 1},
            **setting,
        )
        self.llm.apply_model(self.parts.watch)

    def ask(self, images: Sequence[Image.Image], answer: int) -> tuple[float, int, dict[str, float]]:
        """Seconds until all have their answers, tokens of a prompt, and the seconds of each part."""
        from vllm import SamplingParams
        from vllm.multimodal.processing import BaseMultiModalProcessor

        own = BaseMultiModalProcessor.apply
        BaseMultiModalProcessor.apply = self.parts.around("images", own)
        words = " ".join(f"w{number}" for number in range(TEXT_TOKENS - 1))
        prompts = [{"prompt": f"w99 <image> {words}", "multi_modal_data": {"image": image}} for image in images]
        self.parts.seconds.clear()
        start = time.perf_counter()
        try:
            found = self.llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True), use_tqdm=False
            )
        finally:
            BaseMultiModalProcessor.apply = own
        took = time.perf_counter() - start
        assert all(len(request.outputs[0].token_ids) == answer for request in found)
        return took, len(found[0].prompt_token_ids), dict(self.parts.seconds)


def drawn(number: int, seed: int) -> list[Image.Image]:
    """Random images, each another."""
    noise, side = np.random.default_rng(seed), LLAVA["vision"]["image_size"]
    return [Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(number)]


def compare(
    selectors: Sequence[str],
    promises: Mapping[str, tuple[int, float]],
    options: argparse.Namespace,
    place: Path,
) -> list[dict[str, Any]]:
    """A row for each engine: without a setting, and with each of ``selectors``."""
    engines = {name: Engine(place, name, options.requests, options.batched) for name in (DENSE, *selectors)}
    first: dict[str, list[float]] = {name: [] for name in engines}
    some: dict[str, list[float]] = {name: [] for name in engines}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    order = list(engines)
    for turn in range(-1, options.rounds):  # the first one warms up
        random.Random(turn).shuffle(order)
        for name in order:
            engine, pictures = engines[name], drawn(1 + options.requests, turn + 1)
            alone, length, _ = engine.ask(pictures[:1], 1)
            assert length == TEXT_TOKENS + promises[name][0], (name, length)
            together, _, shares = engine.ask(pictures[1:], options.answer)
            if turn >= 0:
                first[name].append(1000 * alone)
                some[name].append(1000 * together / options.requests)
                parts[name].append({**shares, "rest": together - sum(shares.values())})
    rows = []
    for name in engines:
        count, promise = promises[name]
        faster, sooner = paired_speedup(some[DENSE], some[name]), paired_speedup(first[DENSE], first[name])
        each, alone = summarise(some[name]), summarise(first[name])
        rows.append(
            {
                "setting": name,
                "image_tokens": count,
                "promised": promise,
                "requests_per_second": 1000 / each.p50_ms,
                "faster": [faster.median, faster.q1, faster.q3],
                "kept": faster.median / promise,
                "first_token_ms": [alone.p50_ms, alone.iqr_ms],
                "first_token_faster": [sooner.median, sooner.q1, sooner.q3],
                "ms_per_request": {
                    part: statistics.median(1000 * took.get(part, 0.0) / options.requests for took in parts[name])
                    for part in (*PARTS, "rest")
                },
            }
        )
    del engines, engine
    gc.collect()
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    faster, sooner = ("{:.2f} ({:.2f}-{:.2f})".format(*row[key]) for key in ("faster", "first_token_faster"))
    shares = " | ".join(f"{row['ms_per_request'][part]:.0f}" for part in (*PARTS, "rest"))
    return (
        f"| `{row['setting']}` | {row['image_tokens']} | {row['promised']:.2f} | {row['requests_per_second']:.2f} | "
        f"{faster} | {row['kept']:.2f} | {row['first_token_ms'][0]:.0f} ± {row['first_token_ms'][1]:.0f} | {sooner} | "
        f"{shares} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, action="append", help="kept of 576; default 288, 144 and 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=4, help="at once")
    parser.add_argument("--answer", type=int, default=1, help="tokens of each of these")
    parser.add_argument("--batched", type=int, default=2432, help="tokens of a step, at most: 4 prompts of 608")
    parser.add_argument("--out", help="a JSON file of all rows")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    groups = [[f"{name}:tokens={tokens}" for name in SELECTORS] for tokens in options.tokens or (288, 144, 64)]
    promises = promised(chain.from_iterable(groups))
    print("| setting | image tokens | promised | requests/s | faster | kept | first token, ms | faster |", end=" ")
    print(" | ".join((*PARTS, "rest")), "|\n" + "|---" * (8 + len(PARTS) + 1) + "|", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        for group in groups:
            rows += compare(group, promises, options, Path(place))
            print("\n".join(line(row) for row in rows[-1 - len(group) :]), flush=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    machine = {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    write_json(options.out, {"settings": settings, **machine, "rows": rows})


if __name__ == "__main__":
    from_shell(main)
