"""One of two processes that train with FSDP2; started by torch's launcher from `cli/test_train.py`.

    sharded_worker.py IMAGES OUT

`accelerate` shards on GPUs only: here its state is told to do the same on CPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tiny_training import SHARDED, recipe, trainer
from vitrim.training import build


def sharding(**options: Any) -> Accelerator:
    """An accelerator as `accelerate launch --use_fsdp --fsdp_version 2` makes it on GPUs."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(**options)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def main() -> None:
    """Train up to the fourth update, then from there to the end."""
    images, out = Path(sys.argv[1]), Path(sys.argv[2])
    build.Accelerator = sharding  # type: ignore[misc, assignment]
    for stop in (4, None):
        run = trainer(recipe(**SHARDED), images, out, eval_batch=5, max_updates=stop, resume=stop is None)
        assert all(isinstance(block, FSDPModule) for block in run.model.blocks)
        assert all(isinstance(parameter, DTensor) for parameter in run.model.parameters())
        run.run()


if __name__ == "__main__":
    main()
