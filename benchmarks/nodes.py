"""Executed nodes of OpenVINO, and their milliseconds, by kind of node and method: where the time of merging goes.

    python benchmarks/nodes.py                            # ten methods on DeiT-S, batch 1, bf16 where there is any
    python benchmarks/nodes.py --model vit_tiny_patch16_224 --precision fp32 -m tome:r=13 -m topk:keep_rate=0.5
    python benchmarks/nodes.py --precision int8 --batch-size 8 -m tome:r=13

A node that OpenVINO executes costs some microseconds whatever it computes, so at batch 1 their number is what small
operations cost. Times are medians over runs of what OpenVINO says of each node; weights and images are random.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import timm
import torch

import vitrim
from vitrim.engines.engine import engines_named
from vitrim.engines.formats.openvino import beside_int8, core
from vitrim.measure.machine import environment

METHODS = (
    *("tome:r=13", "tome:keep_rate=0.7", "topk:keep_rate=0.7", "evit:keep_rate=0.7", "mctf:r=16"),
    *("pitome:keep_rate=0.9", "tofu:keep_rate=0.9", "dpc_knn", "kmedoids", "sinkhorn"),
)
KINDS = ("FullyConnected", "Subgraph", "MatMul", "TopK", "Reorder", "Transpose", "Gather", "Slice", "Scatter")


def main() -> None:
    """Print a table in Markdown, dense first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument(
        "--precision", default=None, choices=("fp32", "bf16", "int8"), help="default: bf16 where there is any"
    )
    parser.add_argument("-m", "--method", action="append", help="may repeat; default: ten")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    precision = arguments.precision
    if precision is None:
        found, _ = engines_named(["openvino"], ["fp32", "bf16"])
        precision = found[-1].precision
    torch.manual_seed(0)
    model = timm.create_model(arguments.model).eval()
    place = environment(dtype=precision)
    print(f"{arguments.model}, batch {arguments.batch_size}, OpenVINO in {precision}; {place['device_name']}, ", end="")
    print(f"{place['threads']} threads\n")
    print(f"| method | nodes | ms | {' | '.join(f'{kind} (ms)' for kind in KINDS)} | others (ms) |")
    print(f"|---|{'---|' * (len(KINDS) + 3)}")
    for method in (None, *(arguments.method or METHODS)):
        counts, times = profile(model, method, precision, arguments.batch_size, arguments.runs)
        cells = [f"{counts[kind]} ({times[kind]:.2f})" for kind in (*KINDS, "others")]
        print(f"| `{method or 'dense'}` | {sum(counts.values())} | {sum(times.values()):.1f} | {' | '.join(cells)} |")


def profile(
    model: torch.nn.Module, method: str | None, precision: str, batch_size: int, runs: int
) -> tuple[Counter[str], Counter[str]]:
    """Executed nodes by kind, and the milliseconds they take together."""
    import openvino

    with TemporaryDirectory() as folder:
        file = vitrim.export(model, method, Path(folder) / "model.xml", vitrim.FileSpec(batch=batch_size), check=0)
        images = np.random.default_rng(0).standard_normal((batch_size, *file.shape[1:]), dtype=np.float32)
        if precision == "int8":
            file = file.in_precision(precision, file.path.with_stem("int8"), [images])
        rest = beside_int8() if precision == "int8" else precision
        settings = {
            "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[rest],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERF_COUNT": True,
        }
        request = core().compile_model(file.path, "CPU", settings).create_infer_request()
        kinds: dict[str, str] = {}
        seen: dict[str, list[float]] = {}
        for number in range(runs + 3):
            request.infer(images)
            for node in request.get_profiling_info():
                if number >= 3 and node.status == openvino.ProfilingInfo.Status.EXECUTED:
                    kinds[node.node_name] = next((kind for kind in KINDS if kind in node.node_type), "others")
                    seen.setdefault(node.node_name, []).append(1e3 * node.real_time.total_seconds())
    counts, times = Counter(kinds.values()), Counter[str]()
    for name, each in seen.items():
        times[kinds[name]] += float(np.median(each))
    return counts, times


if __name__ == "__main__":
    main()
