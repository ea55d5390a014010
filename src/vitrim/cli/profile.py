"""``vitrim profile``: parameters, MACs and tokens per block of dense and reduced models."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrim.cli.options import (
    MAX_BATCH,
    MODEL_NAMES,
    BatchSize,
    Compute,
    Images,
    MethodsBesideDense,
    Prompting,
    Weights,
)
from vitrim.cli.output import Output
from vitrim.progress import progress


def profile(
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help=f"models {MODEL_NAMES}")],
    methods: MethodsBesideDense = None,
    convention: Annotated[str, typer.Option(help="parts in the total: all (as MCTF counts), no-attention (most of ViTTM), no-norm (ATM)")] = "all",
    batch_size: BatchSize = 8,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MAX_BATCH, help="number of images, for adaptive methods; default: 32")
    ] = None,
    prompt: Prompting,
    images: Images,
    weights: Weights,
    compute: Compute,
    output: Output,
) -> None:
    """Count parameters, MACs per image and tokens per block. Dense and reduced models.

    Four parts are counted separately: linear and convolution layers, attention products, a method's matching,
    LayerNorm. Random weights suffice, unless the method adapts to the images: then use --pretrained and --images. For a
    vision-language model, the prefill of a prompt is counted: tower, connector and language model.
    """
    with progress(f"counting what {', '.join(models)} computes"):
        from vitrim.measure.profile import profile as count

        compute.start()
        report = count(
            weights.spec(models),
            methods,
            convention=convention,  # type: ignore[arg-type]
            batch_size=batch_size,
            images=images.read(limit=limit),
            prompt=prompt.given,
            seed=compute.seed,
        )
    output.finish(report)
