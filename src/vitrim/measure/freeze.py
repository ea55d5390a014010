"""`freeze`, the function of ``vitrim freeze``: an adaptive method with the mean counts of given images.

report = vitrim.freeze("deit_small_patch16_224", "atm:align=16", "imagenet:ROOT")
vitrim.reduce_(model, report.best)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.checked import Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.saving import entries
from vitrim.data import batches
from vitrim.engines.copies import apart, shared_copy
from vitrim.engines.machine import environment, seeded_draws
from vitrim.engines.macs import profile_of
from vitrim.engines.static import FITTED, adaptive_one, frozen_at, patches_per_block
from vitrim.errors import VitrimError
from vitrim.files import check_file, json_text, write_text
from vitrim.loading import ModelSpec
from vitrim.measure.identity import made_for
from vitrim.measure.inputs import DataSpec, open_images
from vitrim.report import Report, Table


@dataclass(repr=False)
class FreezeReport(Report):
    """The findings of `freeze`.

    Attributes:
        best: the method with fixed counts, for `vitrim.reduce_`.
    """

    best: MethodConfig = field(kw_only=True)


@checked_call
def freeze(
    model: nn.Module | str | ModelSpec,
    method: MethodConfig | str,
    images: Any,
    *,
    out: str | Path | None = "frozen.json",
    seed: Seed = 0,
    on_progress: Callable[[str], None] | None = None,
) -> FreezeReport:
    """Fix the token counts of an adaptive method to their means over images, and save this setting.

    The static setting saves what the method saves on average, runs at any batch size, compiles and exports. With the
    option ``align`` it leaves multiples, the next ones above the means, so that it saves a little less.

    Args:
        model: a module, which is not changed, its name as on the command line, or a `vitrim.ModelSpec`.
        method: config or text, such as ``"atm:align=16"``; its counts depend on the images. Parameters that a training
            run learned for it are used.
        images: a source, as for ``--images``, a dataset, or a `vitrim.DataSpec`, whose ``limit`` defaults to 512.
        out: file for the setting, which ``@FILE`` reads wherever a method is expected; None writes none.
        seed: seed of random weights and parameters.
        on_progress: called with a short text on every step.

    Returns:
        A report with the setting as ``best`` and a row per block: ``block, mean, least, most`` (patches that the
        adaptive method leaves of the images) and ``frozen`` (patches that the setting leaves of each).

    Raises:
        VitrimError: a method that cannot be frozen, no images, or a file that cannot be written.

    Example:
        >>> import io, vitrim
        >>> from PIL import Image
        >>> from vitrim.data import ImageDataset
        >>> files = [io.BytesIO() for _ in range(2)]
        >>> for side, file in enumerate(files, 20):
        ...     Image.effect_noise((side, side), 80).convert("RGB").save(file, "png")
        >>> data = ImageDataset([file.getvalue() for file in files], [0, 1])
        >>> report = freeze("test_vit", "saint:threshold=0.3", data, out=None)
        >>> report.best.is_adaptive(), len(report.best.r), len(report.rows)
        (False, 3, 6)
    """
    spec, source = ModelSpec.of(model), DataSpec.of(images)
    config = adaptive_one(method, "freeze")
    if source.source is None:
        raise VitrimError("counts are means over images: give --images DATA (images=)")
    if out is not None:
        check_file(Path(out))
    tell = on_progress or (lambda _: None)
    with seeded_draws(torch.device("cpu"), seed):
        loaded = spec.load("cpu")
        with apart(loaded.model) as own:
            plain, learned = shared_copy(own.model).eval(), own.learned or loaded.learned
            dataset = open_images(plain, source)
            count = min(source.limit or FITTED, len(dataset))
            tell(f"counting the tokens of {count} images")
            some = (batch for batch, _ in batches(dataset, 32, limit=count))
            counts = patches_per_block(plain, config.changed("align"), some, learned)
            found = frozen_at(config, counts)
            image = dataset[0][0][None]
            left = patches_per_block(plain, found, [image], learned)[0]
            dense, reduced = (profile_of(plain, one, image, learned=learned).macs.total for one in (None, found))
            origin = made_for(plain)
    facts: dict[str, Any] = {
        "model": loaded.name,
        "weights": loaded.weights,
        "environment": environment(seed=seed),
        "adaptive": config.describe(),
        "frozen": found.describe(),
        "saved": 1.0 - reduced / dense,
        "images": {"source": source.name(dataset), "split": dataset.split, "count": count},
    }
    rows = [
        {"block": block, "mean": statistics.fmean(own), "least": min(own), "most": max(own), "frozen": fixed}
        for block, (own, fixed) in enumerate(zip(counts[:, 1:].T.tolist(), left[1:].tolist(), strict=True))
    ]
    columns = tuple(rows[0])
    cells = [tuple(row[name] for name in columns) for row in rows]
    title = f"Patches after every block, of {counts[0, 0]}"
    notes = [
        f"mean, least, most: {config.describe()} on {count} images, one by one; frozen: of every image; of patches, "
        "and a last block that computes the class token alone reads so many",
        f"{found.describe()} saves {100 * facts['saved']:.1f} % of the MACs",
    ]
    report = FreezeReport("freeze", facts, rows, [Table("freeze", title, columns, cells)], notes, best=found)
    if out is not None:
        report.files.append(Path(out))
        content = entries(found, {"made_for": origin, **{key: facts[key] for key in ("adaptive", "images", "weights")}})
        write_text(report.files[0], json_text(content, indent=2) + "\n")
        report.notes.append(f"use it as -m @{out}")
    return report
