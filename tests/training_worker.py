"""One of two processes that train together; `training/test_processes.py` has accelerate start them.

    training_worker.py IMAGES RECIPE OUT

First ``vitrim train RECIPE``, stopped and resumed, into OUT/copies; then `SHARDED` with FSDP2, stopped and resumed,
into OUT/shards. One start of the processes for both: importing takes longer than training.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tiny_training import SHARDED, recipe, trainer
from vitrim.cli import main as vitrim
from vitrim.training import build

EVAL_BATCH = 5


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


def main() -> None:
    """Both runs, one after the other."""
    images, tiny, out = map(Path, sys.argv[1:])
    train_copies(images, tiny, out / "copies")
    train_shards(images, out / "shards")


if __name__ == "__main__":
    main()
