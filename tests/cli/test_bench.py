"""`vitrim bench` from the command line, its rows, and what it says about them."""

import json

import pytest
import torch
from PIL import Image
from timm.models import VisionTransformer
from torch import nn
from typer.testing import CliRunner

from vitrim.cli import app
from vitrim.core.registry import parse_method
from vitrim.engines.copies import reduced_copy
from vitrim.engines.engine import Compiled, compilation
from vitrim.engines.macs import count_macs, profile_of
from vitrim.errors import VitrimError, one_line_errors
from vitrim.loading import create_model
from vitrim.measure import bench as profiling
from vitrim.measure import timing
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.measure.records import Row
from vitrim.measure.speed_report import advice, table, verdicts
from vitrim.measure.timing import macs_speedups, measure

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
MODEL = ["vit_tiny_patch16_224", *(f"--model-option={key}={value}" for key, value in SMALL.items())]
QUICK = ["--repeats=2", "--min-seconds=0"]


def run(*arguments):
    """Standard output of ``vitrim bench``; errors come out as they are raised."""
    result = CliRunner().invoke(app, ["bench", *MODEL, *QUICK, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def model(**options):
    torch.manual_seed(0)
    return VisionTransformer(**(SMALL | options)).eval()


def made_up(method="dense", speedup=1.0, **changes):
    """A row as `measure` gives it, with the setting."""
    row = {
        "model": "vit",
        "method": method,
        "batch_size": 8,
        "precision": "fp32",
        "compiled": False,
        "engine": "eager",
        "dense_engine": "eager",
        "dense_precision": "fp32",
        "dense_kernel": "fused",
        "dense_p50_ms": {"fused": 10.0, "unfused": 12.0},
        "images_per_second": 800.0 * speedup,
        "latency_ms": {"p50": 10.0 / speedup, "p95": 11.0, "min": 9.0, "iqr": 0.5},
        "rounds": 10,
        "peak_memory_mib": 4.0,
        "speedup": speedup,
        "speedup_q1": speedup - 0.01,
        "speedup_q3": speedup + 0.01,
        "macs_speedup": 1.5,
        "ratio": speedup / 1.5,
        "engine_speedup": speedup,
        "prepare_seconds": 0.0,
    }
    return Row(method, row | changes)


# ---- the whole command


def test_record_of_every_setting(tmp_path):
    target = tmp_path / "out" / "bench.json"
    methods = ["-m", "tome:r=2", "-m", "evit:keep_rate=0.5"]
    text = run(*methods, "--precision=fp32,bf16", "-b1", "-b", "2", f"--json={target}")
    record = json.loads(target.read_text())
    assert record["command"] == "bench"
    assert record["environment"]["dtype"] == "fp32,bf16"
    assert {"torch", "timm", "vitrim", "device_name", "threads", "seed"} <= set(record["environment"])
    rows = record["rows"]
    assert [(row["precision"], row["batch_size"], row["method"]) for row in rows] == [
        (precision, size, method)
        for size in (1, 2)
        for method in ("dense", "tome:r=2", "evit:keep_rate=0.5")
        for precision in ("fp32", "bf16")
    ]
    for row in rows:
        assert row["model"] == "vit_tiny_patch16_224"
        assert row["compiled"] is False
        assert row["rounds"] == 2
        assert set(row["latency_ms"]) == {"p50", "p95", "min", "iqr"}
        assert 0 < row["latency_ms"]["min"] <= row["latency_ms"]["p50"] <= row["latency_ms"]["p95"]
        assert row["images_per_second"] == pytest.approx(row["batch_size"] * 1000 / row["latency_ms"]["p50"])
        assert row["ratio"] == pytest.approx(row["speedup"] / row["macs_speedup"])
        assert row["speedup_q1"] <= row["speedup"] <= row["speedup_q3"]
        assert row["peak_memory_mib"] > 0
        assert row["method"] in text
    assert "batch 2; dense on eager is " in text
    assert "; dense on eager bf16 is " in text


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["-b", "1", "-b", "3"], [1, 3]),
        (["--batch-size", "1,3"], [1, 3]),
        (["--batch-size=2,2", "-b2"], [2]),
        ([], [1, 8, 32]),
    ],
)
def test_batch_sizes(monkeypatch, arguments, sizes):
    seen = []

    def fake(sized, methods, **_):
        ((images,),) = (one.ring for one in sized)
        seen.append(len(images))
        return [made_up()]

    monkeypatch.setattr(profiling, "measure_sizes", fake)
    run("-m", "none", *arguments)
    assert seen == sizes


def test_measure_gets_what_was_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(profiling, "measure_sizes", lambda *args, **kwargs: seen.append((args, kwargs)) or [made_up()])
    run("-m", "tome:r=1", "-m", "none", "--dtype=bf16", "-b2", "--compile", "--repeats=1500", "--min-seconds=7")
    [(((sized,), methods), options)] = seen
    host, (images,) = sized.model, sized.ring
    assert list(methods) == ["tome:r=1", "none"]
    assert {parameter.dtype for parameter in host.parameters()} == {images.dtype} == {torch.float32}
    assert images.shape == (2, 3, 32, 32)
    assert [str(engine) for engine in options["engines"]] == ["compile bf16"]  # of a copy in bf16
    assert (options["budget"].min_rounds, options["budget"].min_seconds) == (1500, 7.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tomme"], "unknown method 'tomme'; did you mean 'tome'"),
        (["-m", "tome", "-b", ","], "--batch-size is empty"),
        (["-m", "tome", "--engine", "eager", "--compile"], "--compile is torch.compile and nothing else"),
        (["-m", "atc", "--engine", "onnxruntime"], "atc runs on none of these engines: .*; give eager too"),
        (
            ["-m", "atm", "-b", "2", "--engine", "onnxruntime"],
            "its file is for single images: --batch-size 1; give eager",
        ),
        (
            ["-m", "atm"],
            "atm takes as long as the images ask for, and random ones are not like real ones: give --images",
        ),
        (
            ["-m", "tome", "--engine", "onnxruntime", "--precision", "bf16"],
            "onnxruntime runs fp32 and int8 here",
        ),
        (["-m", "tome", "--device", "cuda:77"], "device 'cuda:77' cannot be used here"),
    ],
)
def test_bad_input_is_found_before_anything_is_timed(monkeypatch, arguments, message):
    monkeypatch.setattr(profiling, "measure_sizes", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(VitrimError, match=message):
        run(*arguments)


@pytest.mark.parametrize("to_file", [True, False])
def test_settings_finished_before_a_failure_are_kept(monkeypatch, tmp_path, to_file):
    real = profiling.measure_sizes

    def fails_at_four(sized, methods, **options):
        if len(sized[0].ring[0]) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nlong story")
        return real(sized, methods, **options)

    monkeypatch.setattr(profiling, "measure_sizes", fails_at_four)
    target = str(tmp_path / "bench.json") if to_file else "-"
    result = CliRunner().invoke(app, ["bench", *MODEL, *QUICK, "-m", "tome:r=1", "-b", "2,4,6", "--json", target])
    assert isinstance(result.exception, VitrimError)
    assert str(result.exception) == "out of memory at batch 4; settings finished before are kept"
    record = json.loads((tmp_path / "bench.json").read_text() if to_file else result.stdout)
    assert [(row["batch_size"], row["method"]) for row in record["rows"]] == [(2, "dense"), (2, "tome:r=1")]


@pytest.mark.slow
def test_a_batch_that_cannot_even_be_made():
    with pytest.raises(VitrimError, match=r"out of memory at batch 1048576;"):
        run("-m", "tome:r=1", "-b", "1048576", "--model-option", "in_chans=40000")  # 170 TB


def test_real_images(tmp_path, monkeypatch):
    for number in range(3):
        folder = tmp_path / "class"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (40, 50), (80 * number, 0, 0)).save(folder / f"{number}.png")
    seen = []

    def fake(sized, methods, **_):
        seen.append(sized[0].ring)
        return [made_up()]

    monkeypatch.setattr(profiling, "measure_sizes", fake)
    text = run("-m", "atm", "--images", str(tmp_path), "-b", "1,3")
    assert [[images.shape for images in ring] for ring in seen] == [[(1, 3, 32, 32)] * 3, [(3, 3, 32, 32)]]
    for ring in seen:  # every image once
        red = torch.cat(ring)[:, 0].mean(dim=(1, 2))
        assert red[0] < red[1] < red[2]
    assert f"atm: token counts depend on the images; speed and promise are those of 32 images of {tmp_path}" in text
    run("-m", "tome:r=1", "--images", str(tmp_path), "-b", "1")
    assert [images.shape for images in seen[2]] == [(1, 3, 32, 32)]  # one says all
    with pytest.raises(VitrimError, match="has 3 images, too few for a batch of 4"):
        run("-m", "tome:r=1", "--images", str(tmp_path), "-b", "2,4")


def test_parameters_that_nobody_learned_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "measure_sizes", lambda *_, **__: [made_up()])
    (tmp_path / "class").mkdir()
    Image.new("RGB", (40, 50)).save(tmp_path / "class" / "0.png")
    target, note = tmp_path / "record.json", "counts depend on parameters of its own, and those are random here"
    given = ("-b1", "--images", str(tmp_path))
    assert f"ia_red2: {note}" in run("-m", "ia_red2", "--json", str(target), *given)
    assert json.loads(target.read_text())["untrained"] == ["ia_red2"]
    assert note not in run("-m", "ia_red2:r=[1,1,1]", "-m", "atm", *given)


# ---- one setting


def fake_times(monkeypatch, **times_ms):
    """Let `measure` find these latencies, in milliseconds per round, and return the names it timed."""
    timed = []

    def fake(runs, device, budget):
        for call in runs.values():
            call()
        timed.extend(runs)
        return {name: torch.tensor(times_ms[name.split(":")[0]]).double().numpy() for name in runs}

    monkeypatch.setattr(timing, "time_interleaved", fake)
    return timed


@pytest.mark.parametrize(("fused", "unfused"), [([4.0, 8.0, 4.0], [5.0, 9.0, 5.0]), ([9.0] * 3, [4.0, 8.0, 4.0])])
def test_dense_is_the_faster_kernel_of_the_same_run(monkeypatch, fused, unfused):
    timed = fake_times(monkeypatch, **{"dense (fused)": fused, "dense (unfused)": unfused}, tome=[2.0, 4.0, 1.0])
    dense, tome = measure(model(), {"tome:r=2": parse_method("tome:r=2")}, torch.zeros(2, 3, 32, 32))
    assert timed == ["dense (fused)", "dense (unfused)", "tome:r=2"]
    kernel = "fused" if fused[0] < unfused[0] else "unfused"
    assert dense["method"] == "dense"
    assert (dense["dense_kernel"], tome["dense_kernel"]) == (kernel, kernel)
    assert tome["dense_p50_ms"] == {"fused": sorted(fused)[1], "unfused": sorted(unfused)[1]}
    assert (dense["latency_ms"]["p50"], dense["images_per_second"]) == (4.0, 500.0)
    assert (dense["speedup"], dense["macs_speedup"], dense["ratio"]) == (1.0, 1.0, 1.0)
    assert (tome["latency_ms"]["p50"], tome["latency_ms"]["min"], tome["images_per_second"]) == (2.0, 1.0, 1000.0)
    assert (tome["speedup"], tome["speedup_q1"], tome["speedup_q3"]) == (2.0, 2.0, 3.0)
    assert tome["ratio"] == 2.0 / tome["macs_speedup"]


def test_promise_is_the_ratio_of_macs():
    host, images = model(), torch.zeros(3, 3, 32, 32)
    tome = parse_method("tome:r=2")
    dense, reduced = (profile_of(host, method, images).macs.total for method in ("none", tome))
    promised = macs_speedups(host, {"tome": reduced_copy(host, tome), "none": reduced_copy(host, "none")}, [images])
    assert promised["tome"] == dense / reduced > 1.1
    assert promised["none"] == 1.0


def test_promise_of_an_adaptive_method_is_that_of_the_images():
    host = model()
    generator = torch.Generator().manual_seed(0)
    noise = 100 * torch.randn(2, 3, 32, 32, generator=generator)
    flat = torch.zeros(2, 3, 32, 32)
    for parameter in host.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    torch.nn.init.zeros_(host.pos_embed)  # the patches of a flat image are then all the same
    method = parse_method("atm:alpha=0.999,beta=0.0,theta_min=0.999,last_block=full")
    mixed = torch.cat([flat, noise])
    reduced = {"atm": reduced_copy(host, method)}
    promises = [macs_speedups(host, reduced, [images])["atm"] for images in (flat, mixed, noise)]
    assert promises[0] > promises[1] > promises[2]


def test_every_candidate_is_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda candidate, **_: compiled.append(candidate) or candidate)
    methods = {text: parse_method(text) for text in ("tome:r=2", "none")}
    budget = Budget(min_rounds=1, min_seconds=0.0)
    rows = measure(model(), methods, torch.zeros(1, 3, 32, 32), engines=[Compiled("fp32")], budget=budget)
    assert len(compiled) == 4
    assert [row["method"] for row in rows] == ["dense", "tome:r=2", "none"]
    measure(model(), methods, torch.zeros(1, 3, 32, 32), budget=budget)
    assert len(compiled) == 4


class Repeat(nn.Module):
    """All instances share the code of one forward, as a model's reductions do, and need a graph each."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            x = x + 1
        return x


@pytest.mark.slow
def test_many_variants_are_compiled_and_not_run_eagerly_instead():
    """The compiler's own limit would let the ninth candidate run uncompiled, without an error."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with compilation(True):
        for count in range(1, 13):
            torch.compile(Repeat(count), backend=backend)(torch.ones(2))
    assert len(graphs) == 12
    torch.compiler.reset()


def test_random_images_fit_the_model_and_follow_the_seed():
    host = model(img_size=(16, 24), in_chans=1)
    first, again, other = (random_images(host, 2, seed) for seed in (0, 0, 1))
    assert first.shape == (2, 1, 16, 24)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "out of memory at batch 8"),
        (MemoryError(), "out of memory at batch 8"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "out of memory at batch 8",
        ),
        (
            RuntimeError("\"x\" not implemented for 'Half'\nmore"),
            "cannot run at batch 8: \"x\" not implemented for 'Half'",
        ),
    ],
)
def test_errors_of_the_machine_are_one_line(error, message):
    with pytest.raises(VitrimError) as caught, one_line_errors("batch 8"):
        raise error
    assert str(caught.value) == f"{message}; settings finished before are kept"


def test_other_errors_surface():
    with pytest.raises(RuntimeError, match="shape") as caught, one_line_errors("batch 8"):
        raise RuntimeError("shape mismatch")
    assert not isinstance(caught.value, VitrimError)


# ---- in words


PAYS = "tome:r=8 pays at batch 8, fp32: 1.30x (1.29-1.31) the speed of dense (fused), where its MACs promise 1.50x"


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        (made_up("tome:r=8", 1.3), [PAYS]),
        (
            made_up("tome:r=8", 0.97, batch_size=1, precision="bf16"),
            [
                "tome:r=8 does not pay at batch 1, bf16: 0.97x the speed of dense (fused), "
                "where its MACs promise 1.50x",
            ],
        ),
        (
            made_up("evit", 1.05, speedup_q1=0.9, speedup_q3=1.2, compiled=True, engine="compile"),
            [
                "evit shows no clear gain at batch 8, fp32, compiled: 1.05x, but its quartiles 0.90-1.20 include 1, "
                "where its MACs promise 1.50x"
            ],
        ),
        *(
            (
                made_up("mctf", speed, speedup_q1=speed - 0.05, speedup_q3=speed + 0.05, speedup_halves=[0.8, 1.25]),
                [
                    f"mctf shows no clear gain at batch 8, fp32: {speed:.2f}x, but the halves of the rounds disagree, "
                    "where its MACs promise 1.50x"
                ],
            )
            for speed in (0.9, 1.2)
        ),
        (made_up("none", 0.97), []),
        (
            made_up("tome:r=8", 1.3, peak_memory_mib=5.0),
            [PAYS, "tome:r=8 needs more memory than dense at batch 8, fp32: 5.00 against 4.00 MiB"],
        ),
    ],
)
def test_verdicts(row, lines):
    assert verdicts(row, made_up()) == lines


def on_engines(method, speedups, promised=1.5, **changes):
    """A row for every engine; the dense model is fastest on openvino."""
    return [
        made_up(
            method, speedup, engine=engine, dense_engine="openvino", macs_speedup=promised,
            prepare_seconds=0.0 if engine == "eager" else 12.5, **changes,
        )
        for engine, speedup in speedups.items()
    ]  # fmt: skip


def test_advice_names_the_engine_and_the_speed_over_the_fastest_dense_model():
    rows = [
        *on_engines("dense", {"eager": 0.4, "onnxruntime": 0.8, "openvino": 1.0}, 1.0),
        *on_engines("tome:r=8", {"eager": 0.5, "onnxruntime": 1.4, "openvino": 1.3}),
        *on_engines("mctf", {"eager": 0.3, "onnxruntime": 0.9, "openvino": 0.95}),
        *on_engines("none", {"eager": 0.4, "onnxruntime": 0.8, "openvino": 1.0}, 1.0),
        *on_engines("topk", {"eager": 0.5, "onnxruntime": 1.2, "openvino": 1.1}, speedup_halves=[1.3, 0.9]),
    ]
    assert advice(rows) == [
        "fastest dense on openvino (fused) at batch 8; it takes 2.50x on eager, 1.25x on onnxruntime",
        "tome:r=8: use onnxruntime; it has 1.40x (1.39-1.41) the speed of dense on openvino (fused), where its MACs "
        "promise 1.50x",
        "mctf does not pay at batch 8: at best, on openvino, 0.95x (0.94-0.96) the speed of dense on openvino "
        "(fused), where its MACs promise 1.50x",
        "topk shows no clear gain at batch 8: on onnxruntime 1.20x (1.19-1.21) dense on openvino (fused), where its "
        "MACs promise 1.50x",
        "fastest at batch 8: tome:r=8 on onnxruntime; `vitrim eval` measures its loss",
    ]


def test_several_engines_stand_one_below_the_other_fastest_first():
    int8 = {"engine": "openvino", "precision": "int8"}
    rows = [
        made_up(speedup=0.4, engine_speedup=1.0),
        made_up(**int8),
        made_up("topk", 0.5, engine_speedup=1.25),
        made_up("topk", 1.3, **int8),
        made_up("tome", 0.6, engine_speedup=1.5),
        made_up("tome", 1.2, **int8),
    ]
    shown = [dict(zip(table(rows).columns, cells, strict=True)) for cells in table(rows).rows]
    assert [(row["engine"], row["method"], row["own engine"]) for row in shown] == [
        *(("openvino int8", "dense", "1.00"), ("openvino int8", "topk", "1.30"), ("openvino int8", "tome", "1.20")),
        *(("eager", "dense", "1.00"), ("eager", "tome", "1.50"), ("eager", "topk", "1.25")),
    ]
    assert "ratio" in table([row for row in rows if row["engine"] == "eager"]).columns


def test_methods_without_a_fixed_graph_are_not_timed_on_engines_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "measure_sizes", lambda *_, **__: [made_up()])
    (tmp_path / "class").mkdir()
    for number in range(2):
        Image.new("RGB", (40, 50)).save(tmp_path / "class" / f"{number}.png")
    text = run("-m", "atm", "-m", "tome:r=1", "-b1,2", "--engine=eager,onnxruntime", "--images", str(tmp_path))
    assert "atm is not timed on onnxruntime at batch 2: how many tokens it keeps depends on the images" in text
    assert "onnxruntime at batch 1" not in text
    assert "tome:r=1 is not timed" not in text


def test_table_and_verdict_are_printed(monkeypatch):
    rows = [
        made_up(),
        made_up("tome:r=8,last_block=class_token", 1.25, peak_memory_mib=None),
        made_up("evit", 0.5, latency_ms={"p50": 20.0, "p95": 30.5, "min": 1.0, "iqr": 1.0}),
    ]
    setting = ("model", "batch_size")
    bare = [Row(row.method, {key: row[key] for key in row if key not in setting}) for row in rows]
    monkeypatch.setattr(profiling, "measure_sizes", lambda *_, **__: bare)
    text = run("-m", "none", "-b8")
    heading = "vit_tiny_patch16_224, batch 8, fp32; dense is fused attention (unfused: 12.00 ms); rounds: 10"
    assert heading in text
    cells = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in cells["evit"]] == [
        *("400.0", "20.00", "30.50", "4.0"),
        *("0.50", "0.49-0.51", "1.50", "0.33"),
    ]
    assert cells["tome:r=8,last_block=class_token"][3].strip() == "-"
    assert "evit does not pay at batch 8, fp32: 0.50x the speed of dense (fused)" in text
    assert "tome:r=8,last_block=class_token does not pay" not in text


# ---- dense models


DENSE_PARTS = {"segmenter": ["trunk", "whole model"], "vitdet": ["trunk + pyramid", "whole model"]}
HEADS = {"vitdet": {"channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1}}


@pytest.mark.parametrize("kind", DENSE_PARTS)
def test_a_dense_model_has_a_row_for_the_part_in_front_of_its_heads(kind, tmp_path):
    """The promise of the trunk's row is of the trunk alone: the head's share makes the whole model's smaller."""
    options = [f"--model-option={key}={value}" for key, value in {**SMALL, **HEADS.get(kind, {})}.items()]
    target = tmp_path / "bench.json"
    arguments = ["bench", f"{kind}:vit_tiny_patch16_224", *options, "-m", "tome:r=4", "-b1", "--seed=3", *QUICK]
    result = CliRunner().invoke(app, [*arguments, f"--json={target}"])
    assert result.exit_code == 0, result.output
    rows = json.loads(target.read_text())["rows"]
    assert [(row["method"], row["part"]) for row in rows] == [
        (method, part) for method in ("dense", "tome:r=4") for part in DENSE_PARTS[kind]
    ]
    front, whole = rows[2:]
    assert front["macs_speedup"] > whole["macs_speedup"] > 1
    for row, dense in zip(rows[2:], rows[:2], strict=True):
        assert row["dense_p50_ms"] == dense["dense_p50_ms"]
        assert row["ratio"] == pytest.approx(row["speedup"] / row["macs_speedup"])
    assert all(part in result.output for part in DENSE_PARTS[kind])
    assert ("these are of the weights and images at hand" in result.output) == (kind == "vitdet")
    assert ("drawn from seed 3" in result.output) == (kind == "vitdet")


def test_the_promise_of_a_trunk_is_that_of_the_backbone():
    host = create_model("segmenter:vit_tiny_patch16_224", options=SMALL)
    images = torch.zeros(1, 3, 32, 32)
    method = parse_method("tome:r=2")
    budget = Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)
    front = measure(host, {"tome:r=2": method}, images, budget=budget)[2]
    reduced = reduced_copy(host, method)
    assert front["macs_speedup"] == count_macs(host.backbone, images).total / (
        count_macs(reduced.backbone, images).total
    )


def test_a_picture_is_written_and_named(tmp_path):
    figure = tmp_path / "times.png"
    said = run("-m", "tome:r=1", "-b", "1", "--figure", str(figure))
    assert f"figure: {figure}" in said.replace("\n", "")
    with Image.open(figure) as picture:
        assert min(picture.size) > 100


@pytest.mark.slow
def test_a_method_with_a_long_text_is_timed_on_files():
    """Amounts of many blocks are longer than the name of a file may be."""
    long, budget = "tome:r=" + "1" * 300, Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)
    images = torch.zeros(1, 3, 32, 32)
    rows = measure(model(depth=1), {long: parse_method("tome:r=1")}, images, engines=["torch.export"], budget=budget)
    assert [row.method for row in rows] == ["dense", long]
