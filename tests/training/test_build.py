"""A run from its parts: what is told to many processes."""

from __future__ import annotations

import pytest

import tiny
from tiny_training import recipe
from vitrim.training.build import look_for_idle, make_accelerator


@pytest.mark.parametrize(
    ("host", "checkpointing", "looks"),
    [("hf_vit", False, True), ("hf_vit", True, False), ("vit", False, False), ("torchvision_vit", False, False)],
)
def test_many_processes_look_for_idle_parameters_where_there_may_be_some(
    host: str, checkpointing: bool, looks: bool
) -> None:
    """By the model, not by how it was named: a finished run of a Hugging Face model has them, too."""
    options = recipe(model="run:folder", grad_checkpointing=checkpointing).recipe
    accelerator = make_accelerator(options, cpu=True)
    look_for_idle(accelerator, tiny.HOSTS[host](), options)
    assert accelerator.ddp_handler is not None
    assert accelerator.ddp_handler.to_kwargs().get("find_unused_parameters", False) is looks
