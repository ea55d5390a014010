"""Hugging Face AST, as a classifier and bare, on spectrograms of overlapping patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import ASTConfig, ASTForAudioClassification, ASTModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
SIZES: dict[str, Any] = {"num_mel_bins": 14, "max_length": 20, "patch_size": 4, "frequency_stride": 2, "time_stride": 3}


def spectrograms(batch: int = 2) -> Tensor:
    return torch.randn(batch, 20, 14, generator=torch.Generator().manual_seed(3))


HOSTS: dict[str, Create] = {
    "hf_ast": hf(ASTForAudioClassification, ASTConfig, **SIZES),
    "hf_ast_model": hf(ASTModel, ASTConfig, **SIZES),
}
INPUTS: dict[str, Callable[[int], Tensor]] = dict.fromkeys(HOSTS, spectrograms)
