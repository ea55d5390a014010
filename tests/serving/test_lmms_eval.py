"""Answers in lmms-eval: those of the library's ``generate`` on the same prompts, with all image tokens and fewer."""

from __future__ import annotations

import tomllib
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

import vitrim
from tiny_vlms import VLMS

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
harness = pytest.importorskip(
    "lmms_eval", reason="lmms-eval is not installed: pip install lmms-eval, in an environment of its own"
)

WORDS = ("<pad>", "<image>", "<bos>", "<unk>", "USER:", "ASSISTANT:", "what", "is", "this", "colour", "which")
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}ASSISTANT:"
)
QUESTIONS = ["what is this", "which colour", "what colour is this", "is this"]
TASK = """
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: "{table}"}}}}
task: tiny_answers
test_split: test
output_type: generate_until
doc_to_visual: !function made.images
doc_to_text: "{{{{question}}}}"
doc_to_target: "answer"
generation_kwargs: {{max_new_tokens: 4, temperature: 0, until: ["<never>"]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
FUNCTIONS = """
import io
from PIL import Image
def images(doc):
    return [Image.open(io.BytesIO(doc["image"])).convert("RGB")]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with its processor."""
    path = tmp_path_factory.mktemp("llava")
    known = [*WORDS, *(f"w{number}" for number in range(60 - len(WORDS)))]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    images = CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(path)  # fmt: skip
    model: Any = VLMS["llava"].create()
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8))


def by_hand(folder: Path, select: str | None = None, method: str | None = None) -> list[str]:
    """The library's answers, one prompt at a time."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor: Any = AutoProcessor.from_pretrained(folder)
    if select is not None or method is not None:
        vitrim.reduce_(model, method, select=select, compact=True)
    answers = []
    for number, question in enumerate(QUESTIONS):
        text = f"USER: <image> {question} ASSISTANT:"
        given = processor(images=picture(number), text=text, return_tensors="pt")
        assert int((given["input_ids"] == 1).sum()) == 36
        with torch.no_grad():
            ids = model.generate(**given, max_new_tokens=4, do_sample=False)
        answers.append(processor.tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def task_folder(path: Path, answers: list[str]) -> Path:
    """A task of a file, whose right answers are ``answers``."""
    encoded = []
    for number in range(len(QUESTIONS)):
        picture(number).save(file := BytesIO(), "png")
        encoded.append(file.getvalue())
    pq.write_table(
        pa.table({"image": pa.array(encoded, pa.binary()), "question": QUESTIONS, "answer": answers}),
        path / "table.parquet",
    )
    (path / "made.py").write_text(FUNCTIONS)
    (path / "tiny.yaml").write_text(TASK.format(table=path / "table.parquet"))
    return path


def score(folder: Path, tasks: Path, arguments: str, batch_size: int = 1) -> tuple[float, list[str]]:
    """The score of ``--model vitrim`` and its answers."""
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.tasks import TaskManager

    from vitrim.serving.lmms_eval.plugin import manifest

    MODEL_REGISTRY_V2.register_manifest(manifest(), overwrite=True)
    manager = TaskManager("ERROR", include_path=str(tasks), model_name="vitrim")
    found = simple_evaluate(
        "vitrim", f"pretrained={folder}{arguments}", tasks=["tiny_answers"], task_manager=manager,
        batch_size=batch_size, device="cpu", bootstrap_iters=0,
    )  # fmt: skip
    samples = sorted(found["samples"]["tiny_answers"], key=lambda sample: sample["doc_id"])
    return found["results"]["tiny_answers"]["exact_match,none"], [sample["filtered_resps"][0] for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ("", {}),
        (",select=divprune:tokens=4", {"select": "divprune:tokens=4"}),
        (',select="divprune:tokens=4,positions=original",method=tome:r=4',
         {"select": "divprune:tokens=4,positions=original", "method": "tome:r=4"}),
    ],
)  # fmt: skip
def test_answers_are_the_librarys(folder: Path, tmp_path: Path, arguments: str, how: dict[str, str]) -> None:
    wanted = by_hand(folder, **how)
    expected = [wanted[0], "something else", wanted[2], wanted[3]]
    for batch_size in (1, 3):
        right, answers = score(folder, task_folder(tmp_path, expected), arguments, batch_size)
        assert answers == wanted
        assert right == 0.75


@pytest.mark.slow
def test_fewer_tokens_change_answers(folder: Path) -> None:
    """Else the test above would not see that none were taken away."""
    assert by_hand(folder) != by_hand(folder, "divprune:tokens=4") != by_hand(folder, "random:tokens=4")


def test_an_answer_ends_before_a_text_of_until(folder: Path) -> None:
    from vitrim.serving.lmms_eval.model import ReducedModel

    model = ReducedModel(str(folder), device="cpu")
    parts = [{"type": "image", "image": picture(0)}, {"type": "text", "text": QUESTIONS[0]}]
    ask = [[{"role": "user", "content": parts}]]
    (whole,) = model.answer(ask, {"max_new_tokens": 4})
    words = whole.split()
    assert len(words) > 1
    for until in (words[1], ["<never>", words[1]]):
        (answer,) = model.answer(ask, {"max_new_tokens": 4, "until": until})
        assert answer == whole[: whole.index(words[1])].strip()


def test_the_entry_point_names_the_model() -> None:
    root = Path(__file__).parents[2]
    entry = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["lmms_eval.models"]
    module, _, name = entry["vitrim"].partition(":")
    found = getattr(import_module(module), name)()
    module, _, name = found.chat_class_path.rpartition(".")
    assert found.model_id == "vitrim"
    assert getattr(import_module(module), name).is_simple is False


def test_what_it_does_not_do_is_said(folder: Path, tmp_path: Path) -> None:
    from vitrim.serving.lmms_eval.model import ReducedModel

    model = ReducedModel(str(folder), device="cpu")
    with pytest.raises(vitrim.VitrimError, match="no likelihoods"):
        model.loglikelihood([])
    with pytest.raises(vitrim.VitrimError, match="a task of one round"):
        model.generate_until_multi_round([])
    with pytest.raises(vitrim.VitrimError, match="unknown selector"):
        ReducedModel(str(folder), select="nothing", device="cpu")
    bare = tmp_path / "bare"
    LlavaProcessor.from_pretrained(folder, chat_template=None).save_pretrained(bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(vitrim.VitrimError, match="no chat template"):
        ReducedModel(str(bare), device="cpu")
