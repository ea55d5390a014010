"""What two processes do that train reduced models together: `training_worker.py` calls it in both.

Every case: one training step on two images per process must be the step of one process on all four.
`core/test_distributed.py` reads what they found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import vitrim
from dense_models import segmenter
from full_matrix import FULL_MATRIX
from tiny_hosts import timm_vit, transformers_vit
from vitrim.core.block import ReducedBlock
from vitrim.core.registry import ask, host_of

PROCESSES = 2
IMAGES = 4
HOSTS = {"vit": timm_vit.HOSTS["vit"], "hf_vit": transformers_vit.HOSTS["hf_vit"]}
DENSE = {"segmenter": segmenter}
"""Whole dense models: patches come back in the last block."""
METHODS = (
    "tome:r=4",
    "evit:keep_rate=0.6",
    "mctf:r=4",
    "cropr",
    "atm:alpha=0.9,beta=0.2,theta_min=0.1,granularity=image",
)


def ddp(model: nn.Module, method: str) -> nn.Module:
    vitrim.reduce_(model, method)
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, method: str) -> nn.Module:
    vitrim.reduce_(model, method)
    return shard(model)


def fsdp_checkpointed(model: nn.Module, method: str) -> nn.Module:
    vitrim.reduce_(model, method)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    else:
        model.gradient_checkpointing_enable()
    return shard(model)


def fsdp_first(model: nn.Module, method: str) -> nn.Module:
    vitrim.reduce_(shard(model), method)
    return model


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in host_of(model).blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


Wrap = Callable[[nn.Module, str], nn.Module]

CASES: dict[str, tuple[str, str, Wrap]] = {
    f"{wrap.__name__}-{host}-{method}": (host, method, wrap)
    for wrap, hosts, chosen in (
        (ddp, HOSTS, METHODS),
        (fsdp, HOSTS, METHODS),
        (fsdp_checkpointed, HOSTS, METHODS[:1]),
        (fsdp_first, HOSTS, METHODS[:3]),
        (ddp, DENSE, ("tome:r=4", "topk:keep_rate=0.6", "cropr")),
    )
    for host in hosts
    for method in chosen
    # every method on one host, and on the other the one that learns
    if FULL_MATRIX or host == "vit" or host in DENSE or method == "cropr" or wrap is fsdp_checkpointed
}


def images_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(IMAGES, 3, 24, 24, generator=generator, dtype=torch.float64)
    return images, torch.arange(IMAGES)


def step(model: nn.Module, wrapped: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """One step of SGD on the loss, a mean over the images that auxiliary outputs are part of."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    logits = ask(model).logits(wrapped(images))
    if logits.ndim == 4:  # one label for all pixels
        labels = labels[:, None, None].expand(-1, *logits.shape[2:])
    loss = F.cross_entropy(logits, labels)
    for _, _, value in vitrim.get_reduction(model).state.aux:
        loss = loss + value.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def difference(case: str, rank: int) -> float:
    """The largest difference in loss, gradients, updated parameters and, restored, in outputs."""
    host, method, wrap = CASES[case]
    images, labels = images_and_labels()
    create = {**HOSTS, **DENSE}[host]
    alone = create().double().train()
    vitrim.reduce_(alone, method)
    loss = step(alone, alone, images, labels)

    model = create().double().train()
    wrapped = wrap(model, method)
    part = slice(rank * IMAGES // PROCESSES, (rank + 1) * IMAGES // PROCESSES)
    mean_loss = step(model, wrapped, images[part], labels[part]) / PROCESSES
    dist.all_reduce(mean_loss)
    found = [(mean_loss - loss).abs()]
    together = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None, name
        found.append((whole(together[name].grad) - parameter.grad).abs().max())
        found.append((whole(together[name].detach()) - parameter.detach()).abs().max())

    was_sharded = isinstance(model, FSDPModule)
    for each in (model, alone):
        vitrim.restore_(each)
    for block in host_of(model).blocks(model):
        assert not isinstance(block, ReducedBlock)
        assert isinstance(block, FSDPModule) == was_sharded
    with torch.no_grad():
        outputs = [ask(each).logits(each.eval()(images)) for each in (model, alone)]
    found.append((outputs[0] - outputs[1]).abs().max())
    return float(torch.stack(found).max())


def refused_when_sharded() -> str:
    """The error of a method that learns parameters on a model that is sharded already."""
    model = shard(HOSTS["vit"]())
    try:
        vitrim.reduce_(model, "cropr")
    except vitrim.UnsupportedModelError as error:
        return str(error)
    return "no error"


def all_cases(folder: Path) -> None:
    """Every case; process 0 writes ``folder/found.json``: the largest difference of each, or its error."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            found[case] = difference(case, rank)
        except Exception as error:  # both processes fail alike; the test shows it
            found[case] = f"{type(error).__name__}: {error}"
    found["refused"] = refused_when_sharded()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
