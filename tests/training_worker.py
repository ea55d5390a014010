"""One of two processes that train together; accelerate starts them, see `suite.py` and `training/test_processes.py`.

    training_worker.py IMAGES RECIPE OUT

First ``vitrim eval``, stopped and resumed, with its record in OUT/eval.json and decisions in OUT/decisions; then
``vitrim train RECIPE``, stopped and resumed, into OUT/copies; then `SHARDED` with FSDP2, stopped and resumed,
into OUT/shards; then a detector, whole into OUT/detector and stopped and resumed into OUT/detector-parts, with what
process 1 ends with beside it; last the cases of `distributed_worker.py`, into OUT/found.json. One start of the
processes for all: importing takes longer than training.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import tiny_dense
from distributed_worker import all_cases
from tiny_training import SHARDED, recipe, trainer
from vitrim.cli import main as vitrim
from vitrim.measure.records import Batch
from vitrim.measure.run import Measurement
from vitrim.training import build
from vitrim.training.recipe import Resolved

EVAL_BATCH = 5


def evaluation(images: Path, out: Path) -> list[str]:
    """The command line of an evaluation that takes four batches, with what it writes in ``out``."""
    command = ["vitrim", "eval", "test_vit", "--model-option", "img_size=64", "--model-option", "num_classes=3"]
    command += [
        "--data",
        str(images),
        "--split",
        "test",
        "--batch-size",
        "3",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--seed",
        "3",
    ]
    for method in ("tome:r=2", "random:keep_rate=0.5", "atm:alpha=0.99,beta=0.2,theta_min=0.5"):
        command += ["-m", method]
    return [*command, "--json", str(out / "eval.json"), "--decisions", str(out / "decisions")]


def evaluate(images: Path, out: Path) -> None:
    """``vitrim eval``: each process stops after its first batch, and both go on from there."""
    sys.argv = [*evaluation(images, out), "--out", str(out / "part")]
    update = Measurement.update

    def stopped(self: Measurement, batch: Batch) -> None:
        if self.turns:
            raise KeyboardInterrupt
        update(self, batch)

    Measurement.update = stopped  # type: ignore[method-assign]
    try:
        vitrim()
    except SystemExit as stop:
        if stop.code != 130:
            raise
    Measurement.update = update  # type: ignore[method-assign]
    PartialState().wait_for_everyone()  # another run would begin when all have ended
    sys.argv.append("--resume")
    vitrim()


def train_copies(images: Path, tiny: Path, out: Path) -> None:
    """``vitrim train``, which DDP keeps equal in both processes: up to update 11, then from there to the end."""
    command = ["vitrim", "train", str(tiny), "--data", str(images), "--device", "cpu", "--threads", "1"]
    command += ["--log-every", "1", "--eval-batch", str(EVAL_BATCH), "--json", str(out.with_suffix(".json"))]
    for part in (["--max-updates", "11"], ["--resume"]):
        sys.argv = [*command, "--out", str(out), *part]
        vitrim()


def train_shards(images: Path, out: Path) -> None:
    """Up to the fourth update, then from there to the end, with every block's weights shared out."""
    build.Accelerator = sharding  # type: ignore[misc, assignment]
    for stop in (4, None):
        run = trainer(recipe(**SHARDED), images, out, eval_batch=EVAL_BATCH, max_updates=stop, resume=stop is None)
        assert all(isinstance(block, FSDPModule) for block in run.learner.model.blocks)
        assert all(isinstance(parameter, DTensor) for parameter in run.learner.model.parameters())
        run.run()


def train_detector(out: Path) -> None:
    """Four updates of boxes and masks, of which an image of process 1 has none: without a break, and with one."""
    for name, stops in (("detector", (None,)), ("detector-parts", (2, None))):
        for stop in stops:
            run = tiny_dense.trainer(
                detector(), out / name, boxes(), max_updates=stop, resume=len(stops) == 2 and stop is None
            )
            run.run()
        if run.accelerator.process_index == 1:
            save_file(run.learner.model.state_dict(), out / f"{name}-1.safetensors")


def detector() -> Resolved:
    """The recipe of a small detector with masks."""
    options = {"samples": 32, "channels": 8, "hidden": 8}
    return tiny_dense.recipe("instances", epochs=4, model_options=options, method="tome:r=4")


def boxes() -> Any:
    """Four images, one of them without an object."""
    return tiny_dense.data("instances", 0, 1, 2, empty=1)


def sharding(**options: Any) -> Accelerator:
    """An accelerator as `accelerate launch --use_fsdp --fsdp_version 2` makes it on GPUs.

    `accelerate` shards on GPUs only: here its state is told to do the same on CPUs.
    """
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(**options)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def forget_settings() -> None:
    """Let accelerate forget the shards, but not the other process."""
    build.Accelerator = Accelerator  # type: ignore[misc, assignment]
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU


def main() -> None:
    """The evaluation and all runs, one after the other."""
    images, tiny, out = map(Path, sys.argv[1:])
    evaluate(images, out)
    train_copies(images, tiny, out / "copies")
    train_shards(images, out / "shards")
    forget_settings()
    train_detector(out)
    all_cases(out)


if __name__ == "__main__":
    main()
