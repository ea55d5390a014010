"""The benchmarks run: loops are the methods they stand for, tiny settings of each command pass."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitrim.core.reduce import reduce_
from vitrim.core.registry import parse_method, parse_selector, selectors
from vitrim.engines.copies import dense_copies, reduced_copy
from vitrim.engines.macs import count_macs
from vitrim.errors import VitrimError
from vitrim.loading import create_model

FOLDER = str(Path(__file__).parents[1] / "benchmarks")
sys.path.append(FOLDER)  # where its scripts find each other
try:
    import accuracy
    import gpu
    import image_selectors
    import kernels
    import overhead
    import plain_loops
    import upstream
    import vlm_prefill
    import widths
    from script import from_shell
finally:
    sys.path.remove(FOLDER)

SMALL = ["--model", "test_vit", "--batch-size", "1", "--threads", "1", "--rounds", "1"]
LOOPED = (
    "tome:r=2",
    "topk",
    "evit",
    "dynamicvit",
    "cropr:r=2",
    "sit",
    "diffrate:r=2,discount_sizes=true",
    "gtp:num_prop=2",
)
SCRIPTS = {path.stem for path in Path(FOLDER).glob("*.py")} - {"upstream_families"}
"""All but the one that is imported beside the tests of transformers."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return create_model("test_vit", options={"img_size": 64}).eval()


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_what_a_script_imports_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module(name)


def test_bad_input_from_the_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_shell(lambda: overhead.main([*SMALL, "-m", "nope"]))
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("error: unknown method 'nope'; ")
    assert told.count("\n") == 1
    with pytest.raises(ZeroDivisionError):  # a defect, whose traceback is wanted
        from_shell(lambda: 1 // 0)


@pytest.mark.slow
def test_loops_give_the_logits_of_vitrim(model: nn.Module) -> None:
    configs = [parse_method(method) for method in LOOPED]
    assert {config.name for config in configs} == set(plain_loops.LOOPS)
    assert max(overhead.check_loops(model, configs, torch.randn(2, 3, 64, 64)).values()) < 1e-12


def test_a_wrong_loop_is_noticed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plain_loops.LOOPS, "evit", plain_loops.topk)
    with pytest.raises(VitrimError, match="the loop is not the method"):
        overhead.check_loops(model, [parse_method("evit")], torch.randn(1, 3, 64, 64))


@pytest.mark.slow
def test_a_method_is_timed_in_all_its_forms() -> None:
    (row,) = overhead.main([*SMALL, "-m", "topk", "--operators"])
    assert {"over_dense", "over_slice", "over_loop", "over_operators"} <= set(row)
    assert row["ratio"] == pytest.approx(row["over_dense"]["median"] / row["macs_speedup"])


@pytest.mark.slow
def test_each_model_runs_on_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def kernel(*args: Any, **given: Any) -> torch.Tensor:
        taken.append(True)
        return own(*args, **given)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", kernel)
    model, images = create_model("test_vit", options={"img_size": 64}).eval(), torch.randn(1, 3, 64, 64)
    for name, calls in (("fused", 12), ("unfused", 0)):  # two models of six blocks
        taken.clear()
        for each in (dense_copies(model)[name], reduced_copy(dense_copies(model)[name], "topk")):
            kernels.on(name, each, images)
        assert len(taken) == calls
    rows = kernels.main([*SMALL, "--size", "64", "-m", "topk"])
    assert [row["method"] for row in rows] == ["dense", "topk"]
    assert all(row["ratio"] == pytest.approx(row["unfused_ms"] / row["fused_ms"]) for row in rows)


@pytest.mark.parametrize(
    ("method", "routing"),
    [
        ("tome:r=2", 0),
        ("topk", 0),
        ("l2", 0),
        ("cropr:r=2", 64 * (16 + 13 + 11 + 9)),
        ("atm", 0),
    ],  # scores count as linear
)
def test_the_slice_computes_as_much_as_the_method(model: nn.Module, method: str, routing: int) -> None:
    images = torch.randn(1, 3, 64, 64)
    one = overhead.subject(model, parse_method(method), images)
    of_slice, of_method = (
        count_macs(plain_loops.Plain(model, one.forms["slice"]), images),
        count_macs(one.reduced, images),
    )
    assert (of_slice.linear + routing, of_slice.attention) == (of_method.linear, of_method.attention)


@pytest.mark.slow
def test_the_gpu_command_with_tiny_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device", "cpu", "--tiny", "--rounds", "1", "--method", "topk", "--batch-size", "1"]
    rows = gpu.main([*given, "--part", "bias", "determinism", "speed", "--json", str(tmp_path / "rows.json")])
    found = {(row["part"], row.get("engine")): row for row in rows}
    assert found["determinism", None]["forward"]
    assert found["speed", "eager"]["rows"][1]["speedup"] > 0
    assert found["speed", "graph"]["failed"] == "CUDA graphs need a CUDA device"
    assert "mean nothing" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == len(rows)


@pytest.mark.slow
def test_speeds_of_a_gpu_as_a_text_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device", "cpu", "--tiny", "--markdown", "--rounds", "1", "--batch-size", "1"]
    rows = gpu.main([*given, "--method", "topk", "tome:r=3", "--rival", "48"])
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r".+, vitrim \S+, torch \S+, timm \S+; random weights", lines[0])
    head, _, *cells = [line.strip("| ").split(" | ") for line in lines[2:12]]
    assert head[4:8] == ["dtype", "method", "dense ms", "ms"]
    assert {len(line) for line in cells} == {len(head)}
    topk = rows[0]["method"]
    named = ["dense at 48 px", "tome:r=3", "tome:r=3 at 48 px", topk, f"{topk} at 48 px"]
    assert sorted({line[5].strip("`") for line in cells[:6]}) == sorted(named)
    dense, *others = rows[0]["rows"]
    for line, found in zip(cells[:3], others, strict=True):
        assert line[:5] == ["test_vit", "64", "1", "eager", "bf16"]
        assert line[5:] == [
            f"`{found['method']}`",
            f"{dense['latency_ms']['p50']:.2f}",
            f"{found['latency_ms']['p50']:.2f}",
            f"{found['speedup']:.2f} [{found['speedup_q1']:.2f}, {found['speedup_q3']:.2f}]",
            f"{found['macs_speedup']:.2f}",
        ]
    assert 0.45 < 1 / others[0]["macs_speedup"] <= 0.5  # a name stands for half the MACs, a setting for itself
    assert [line[8] for line in cells[6:]] == ["CUDA graphs need a CUDA device"] * 2


def test_an_unknown_method_of_the_gpu_command_is_named() -> None:
    with pytest.raises(VitrimError, match=r"unknown method 'tomee'"):
        gpu.main(["--device", "cpu", "--tiny", "--method", "tomee"])


def test_channels_are_proportional_attention() -> None:
    given = kernels.inputs((2, 2, 9, 16), torch.bfloat16, torch.device("cpu"))
    assert kernels.error("channels", given) < 1.5 * kernels.error("bias", given) < 0.05
    assert kernels.error("without sizes", given) > 0.1


# ---- the libraries' own tests ----------------------------------------------------------------------------------------


def test_a_failure_of_reduced_models_alone_needs_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = dict.fromkeys(("same", "traced", "wrong", "gone"), ("passed", "")) | {"broken": ("failed", "own fault")}
    reduced = own | {"traced": ("failed", "Foo: torch.fx cannot trace it"), "wrong": ("failed", "1 != 2")}
    del reduced["gone"]
    runs = {"": {"outcomes": own}, "tome:r=0": {"outcomes": reduced, "reduced": 4, "refused": {"Swin: no host": 2}}}
    monkeypatch.setattr(upstream, "outcomes", lambda sources, file, method, choice: runs[method])
    assert upstream.compare(Path(), Path("test_models.py"), "tome:r=0", []) == 2
    row, *notes = capsys.readouterr().out.splitlines()
    assert row == "| test_models.py | 5 | 4 | 1 | 3 | 2 |"
    assert "NO REASON: wrong: 1 != 2" in notes[1]
    assert "NO REASON: gone: did not run" in notes[2]


@pytest.mark.slow  # starts pytest twice; the command fails by itself where no test ran
def test_models_of_other_peoples_tests_are_reduced(tmp_path: Path) -> None:
    file = tmp_path / "test_models.py"
    file.write_text(
        "import timm, torch, vitrim\n"
        "def make():\n"
        "    return timm.create_model('test_vit', img_size=32, patch_size=8).eval()\n"
        "def test_logits():\n"
        "    assert make()(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)\n"
        "def test_it_is_dense():\n"
        "    assert type(make().blocks[0]).__name__ == 'Block', 'reduced'\n"
    )
    own, found = (upstream.outcomes(tmp_path, file, method, []) for method in ("", "tome:r=0"))
    ends = [{name.partition("::")[2]: end[0] for name, end in run["outcomes"].items()} for run in (own, found)]
    assert ends[0] == {"test_logits": "passed", "test_it_is_dense": "passed"}
    assert ends[1] == {"test_logits": "passed", "test_it_is_dense": "failed"}
    assert (own["reduced"], found["reduced"]) == (0, 2)


def test_sources_without_tests_of_models_run_the_shared_ones(tmp_path: Path) -> None:
    assert upstream.files_of(None, tmp_path, [], "save") == [(tmp_path, upstream.FAMILIES, ["-k", "save"])]
    models = tmp_path / "tests" / "models"
    models.mkdir(parents=True)
    files = upstream.files_of(None, tmp_path, ["vit"], None)
    assert files == [(tmp_path, models / "vit" / "test_modeling_vit.py", [])]
    assert len(upstream.files_of(None, tmp_path, [], None)) > 20


@pytest.mark.slow  # makes all tiny models, twice
def test_shared_tests_run_on_the_tiny_models_of_every_family(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_modeling_common.py").write_text(
        "import torch\n"
        "from tests.exporters.test_export import ExportTesterMixin\n"
        "class ModelTesterMixin(ExportTesterMixin):\n"
        "    def test_forward(self):\n"
        "        for kind in self.all_model_classes:\n"
        "            config, given = self.model_tester.prepare_config_and_inputs_for_common()\n"
        "            assert kind(config).eval()(**given) is not None\n"
    )
    own, found = (upstream.outcomes(tmp_path, upstream.FAMILIES, method, []) for method in ("", "tome:r=0"))
    assert {end for end, _ in own["outcomes"].values()} == {end for end, _ in found["outcomes"].values()} == {"passed"}
    assert own["reduced"] == 0
    assert found["reduced"] >= len(own["outcomes"]) > 50
    names = {upstream._row_of(upstream.FAMILIES, test) for test in own["outcomes"]}
    assert {"ViTModel", "LlavaForConditionalGeneration", "VJEPA2Model"} <= names


@pytest.mark.slow
def test_every_selector_is_timed_on_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("vlm_prefill")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setitem(script.SIZES, "llava", {"vision": {**size, "image_size": 32, "patch_size": 4}, "text": size})
    said, rows = script.choose(1, 9)
    assert said.startswith("dense: ")
    assert [row[:2] for row in rows] == [
        (f"{name}:tokens=9", "9") for name in selectors() if name not in ("evs", "vcast", "pixelprune")
    ]


@pytest.mark.slow
def test_margins_of_a_page_go_in_front_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as `pixelprune` finds, and at most as many by a smaller image."""
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("vlm_prefill")
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = {**script.PAGE["text_config"], **size, "rope_parameters": rope}
    vision = {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 2, "patch_size": 14}
    monkeypatch.setattr(script, "PAGE", {"vision_config": vision, "text_config": text})
    _, ((name, kept, *_), (smaller, few, *_)) = script.choose_on_page(1, grid=(14, 10))
    assert (name, smaller) == ("pixelprune", f"resize:tokens={kept}")
    assert 0.5 * float(kept) < float(few) <= float(kept) < 0.9 * 140


@pytest.mark.slow
def test_what_reads_selected_tokens_is_the_end_of_the_model(model: nn.Module) -> None:
    """With all patches and the image's own class token it is the model, wherever that is cut."""
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for readers in (1, 3):
            tower = image_selectors.Tower(model, readers)
            _, x = tower.tokens(images)
            torch.testing.assert_close(tower.read(x[:, 1:], x[:, 0]), model(images))
            assert torch.equal(tower.seen(images).features, x[:, 1:])
            labels = torch.tensor([0, 1])
            right = image_selectors.answers(tower, [(images, labels)], torch.zeros(x.shape[2]), [0.25, 1.0])
            kept = {key: own for key, own in right.same.items() if key[1] == 1.0}
            assert all((own == 1).all() for own in kept.values())
            assert right.counts["divprune", 0.25] == round(0.25 * x[:, 1:].shape[1])
            assert {name for name, _ in kept} == set(selectors()) - image_selectors.LEFT_OUT


def test_paired_differences_are_those_of_scipy() -> None:
    from scipy.stats import ttest_rel

    own, other = torch.rand(40).round(), torch.rand(40).round()
    mean, error = image_selectors.paired(own, other)
    assert mean / error == pytest.approx(ttest_rel(own.numpy(), other.numpy()).statistic, abs=1e-5)


def test_losses_at_a_speed_are_on_the_line_between_timed_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By numpy's interpolation, whatever the order of the rows of `vitrim compare`."""
    losses, errors, speeds = [-0.004, 0.01, 0.06], [0.002, 0.006, 0.01], [1.2, 1.4, 1.9]
    rows = [
        {
            "method": f"tome:r={row}", "loss": losses[row], "loss_error": errors[row],
            "speeds": [{"batch_size": 1, "speedup": 9.0}, {"batch_size": 8, "speedup": speeds[row]}],
        }
        for row in (2, 0, 1)
    ]  # fmt: skip
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"rows": [{"method": "dense", "speeds": []}, *rows]}))
    accuracy.main(["at-speed", str(file)])
    wanted = [
        f"{-100 * np.interp(speed, speeds, losses):+.1f} ± {100 * np.interp(speed, speeds, errors):.1f}"
        for speed in (1.25, 1.5)
    ]
    assert capsys.readouterr().out.splitlines()[-1] == f"| `tome` | +0.4 ± 0.2 * | {wanted[0]} | {wanted[1]} | - |"


def vit(heads: int, width: int = 8, seed: int = 0, **options: Any) -> VisionTransformer:
    """A ViT whose every parameter is random: biases, scales and tokens, too."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "num_classes": 5, "init_values": 0.5, "depth": 3}
    model = VisionTransformer(embed_dim=width * heads, num_heads=heads, **(sizes | options)).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.2)
    return model


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("method", ["none", "tome:r=3", "mctf:r=3", "pitome", "topk", "ppt:r=3", "diffrate:r=3"])
def test_a_wider_model_decides_and_computes_the_same(times: int, method: str) -> None:
    narrow, wide, images = vit(3), vit(3 * times, seed=1), torch.randn(2, 3, 32, 32)
    assert widths.widen_(wide, narrow) <= 1e-5
    of_narrow, of_wide = (reduce_(each, parse_method(method)) for each in (narrow, wide))
    with torch.inference_mode():
        torch.testing.assert_close(wide(images), narrow(images), rtol=0, atol=1e-5)
    assert torch.equal(of_wide.state.source, of_narrow.state.source)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"heads": 6, "depth": 2}, "the same layers with more channels, but blocks.2.norm1.weight differs"),
        ({"heads": 6, "depth": 4}, "the same layers with more channels, but blocks.3.norm1.weight is one more"),
        ({"heads": 4}, r"cls_token: \(1, 1, 32\) is no multiple of \(1, 1, 24\)"),
        ({"heads": 3, "width": 16}, "heads of the same width and more of them, but logits differ by"),
    ],
)
def test_a_model_that_is_not_just_wider_is_refused(other: dict[str, int], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        widths.widen_(vit(**other), vit(3))


@pytest.mark.slow
def test_methods_are_set_to_a_cut_and_scored(tmp_path: Path) -> None:
    for number in range(4):
        image = Image.fromarray(np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8))
        file = tmp_path / "photos" / ("airplane", "ship")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    photos, record = str(tmp_path / "photos"), tmp_path / "cuts.json"
    given = ["--chosen-on", photos, "--data", photos, "--cut", "0.3", "--method", "topk", "--json", str(record)]
    accuracy.main(["cuts", "vitrim:cifar10_vit", *given])
    dense, topk = json.loads(record.read_text())["cuts"]["0.3"]["rows"]
    assert sum(topk["gmacs"].values()) / sum(dense["gmacs"].values()) == pytest.approx(0.7, abs=accuracy.REACHED)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("vllm_serving")


def small_shapes(script: Any) -> dict[str, Any]:
    """LLaVA and Qwen3-VL of 16 image tokens."""
    vision = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
    text = script.language(64, 128, 2, 2, 2)
    llava = script.Shape({**vision, "image_size": 32, "patch_size": 8}, text, 32, (script.POOL, script.DIVPRUNE))
    return {"llava": llava, "qwen": script.SHAPES["tiny"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "qwen"])
def test_prompts_to_servers_have_as_many_tokens_as_was_promised(name: str, serving: Any, tmp_path: Path) -> None:
    """By the processor of the written folder, and by a model that transformers makes of it."""
    from transformers import AutoConfig, AutoProcessor

    shape = small_shapes(serving)[name]
    serving.write(shape, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == serving.configuration(shape).architectures
    place = "<|vision_start|><|image_pad|><|vision_end|>" if shape.packed else "<image>"
    text = f"{place} {serving.question(shape, 1)}"
    given = AutoProcessor.from_pretrained(tmp_path)(text=text, images=serving.drawn(shape, 1, 0), return_tensors="pt")
    assert given["input_ids"].shape == (1, 16 + serving.TEXT_TOKENS)
    assert not (given["input_ids"] == 3).any()  # no word is unknown
    promises = serving.promised(shape, shape.select[1:])
    assert promises[serving.DENSE] == (16, 1.0)
    known = {select: found for select, (found, _) in promises.items() if select not in (serving.DENSE, "pixelprune")}
    assert known == {select: parse_selector(select).count((4, 4)) for select in known}
    assert all(promise > 1 for count, promise in promises.values() if count < 16)


def test_pages_differ_and_keep_as_many_cells(serving: Any) -> None:
    shape = serving.SHAPES["qwen"]
    pages = [np.array(one) for one in serving.drawn(shape, 3, 5)]
    assert all((one != other).any() for one, other in itertools.pairwise(pages))
    prune: Any = parse_selector("pixelprune")
    masks = [prune.kept_cells(vlm_prefill.in_cells(torch.tensor(one).permute(2, 0, 1), 32)) for one in pages]
    assert all(torch.equal(masks[0], mask) for mask in masks)
    assert 0.3 < masks[0].float().mean() < 0.9


def test_rows_of_servers_compare_with_dense_of_the_same_round(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server twice as fast as dense, on a machine whose speed changes; arrivals follow what dense answers."""
    rates: list[tuple[float, int | None]] = []

    def bench(address: str, asked: list[str | None], rate: float, flight: int | None, seed: int) -> dict[str, Any]:
        (select,) = set(asked)
        assert address == ("plain" if select is None else "choosing")
        rates.append((rate, flight))
        count = 16 if select is None else 4
        throughput = (1 if select is None else 2) * (1 + seed % 3)
        waits = [0.1 * (place + 1) for place in range(len(asked))]
        return {"request_throughput": throughput, "ttfts": waits, "input_lens": [count + 32] * len(asked)}

    def coming(shape: Any, number: int, seed: int, settings: list[str | None], answer: int, repeated: float) -> Any:
        return settings * number

    monkeypatch.setattr(serving, "bench", bench)
    monkeypatch.setattr(serving, "coming", coming)
    monkeypatch.setattr(
        serving, "serving", lambda place, dense, options: nullcontext(["plain" if dense else "choosing"])
    )
    monkeypatch.setattr(serving, "promised", lambda *_: {"dense": (16, 1.0), "pool": (4, 2.5)})
    options = argparse.Namespace(flight=[1, 2], rounds=3, batched=64, answer=1)
    rows = serving.load(small_shapes(serving)["llava"], Path(), ["pool"], options)
    assert [(row["caches"], row["in flight"]) for row in rows] == [
        (cache, flight) for cache in ("off", "on") for flight in (1, 1, 2, 2, "0.8 of dense", "0.8 of dense")
    ]
    assert [row["faster"] for row in rows[:4]] == ["1.00 [1.00, 1.00]", "2.00 [2.00, 2.00]"] * 2
    assert [row["kept"] for row in rows] == ["1.00", "0.80"] * 2 + [""] * 8
    assert rows[3]["first token, ms: p50"] == "650"  # of twelve in every round
    assert rows[3]["requests"] == 3 * 12
    assert math.isinf(rates[0][0])
    assert all(rate in {8 * own for own in (1, 2, 3)} for rate, flight in rates[2:18] if flight)
    assert all(rate in {0.8 * own for own in (1, 2, 3)} for rate, flight in rates[2:18] if flight is None)
