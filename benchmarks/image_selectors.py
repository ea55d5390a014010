"""Every selector of image tokens on photographs: does the class survive where only the selected tokens are read?

    WEIGHTS="--model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors"
    python benchmarks/image_selectors.py $WEIGHTS --chosen-on PHOTOS --readers     # how many blocks read
    python benchmarks/image_selectors.py $WEIGHTS --chosen-on PHOTOS --data HELD_OUT --json selectors.json

No language model with weights is at hand, so the tower is cut in two: its first blocks are the tower, and the last
blocks, norm and classifier read, as a language model would, what the selector leaves. The class token, which has seen
all patches, does not go on: in its place the reader gets its mean over the photographs of PHOTOS, the same
for every image, so that what it answers comes from the selected tokens. How many blocks read is decided there, too.
Nothing is trained. HELD_OUT is scored once.

A linear probe on the mean of the selected tokens would say less: means of equal cells have the mean of all tokens, so
`pool` loses nothing there whatever it blurs, and a random draw is an unbiased estimate of that mean.

Selectors see the tokens as they leave the tower, without a connector, and the attention that they ask for: of the
tower's last block (`read`), and for `prumerge` query and keys of the block behind it, as released. There is no
question: `dart` has pivots of the image alone, `cdpruner` diversity alone (text=none). `visionzip` hands no class token
on. `evs` is for videos and left out. `random` is the mean of ten seeds.

Every number is a difference of top-1 in points with the standard error of the mean over images, paired image by image:
from the same reader with all tokens, from `random` (of an image, the share of its draws that are right), and from
`pool`, which keeps fewer tokens where no rectangle has as many cells. It says nothing about language.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from script import from_shell, write_json
from vitrim.core.registry import parse_selector, selectors
from vitrim.core.selection import Seen
from vitrim.data import batches, eval_transform, load_images
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.weights import load_checkpoint

KEEPS = (0.5, 0.25, 0.11)
SEEDS = range(10)
WITHOUT_TEXT = {"dart": "text_pivots=0", "cdpruner": "text=none"}
LEFT_OUT = {"evs"}
READERS = (1, 2, 3, 4)


class Tower:
    """A ViT of timm with a class token, cut into a tower and a reader.

    Args:
        model: in eval mode.
        readers: blocks of the reader, the last ones.
    """

    def __init__(self, model: nn.Module, readers: int) -> None:
        self.model, self.first = model, len(model.blocks) - readers

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 1 + N, D) what the last block of the tower gets, and what it makes, the class token first."""
        model = self.model
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for block in model.blocks[: self.first - 1]:
            x = block(x)
        return x, model.blocks[self.first - 1](x)

    def heads(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, 1 + N, d) queries and keys of block ``number``."""
        block = self.model.blocks[number]
        own = block.attn
        q, k, _ = own.qkv(block.norm1(x)).unflatten(2, (3, own.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return own.q_norm(q), own.k_norm(k)

    def seen(self, images: Tensor) -> Seen:
        """The patches (B, N, D) of the tower, with all that a selector may ask for but a class token and text."""
        before, x = self.tokens(images)
        query, keys = self.heads(self.first - 1, before)
        scale = query.shape[-1] ** -0.5
        attention = (query[:, :, :1] @ keys.transpose(2, 3) * scale).softmax(dim=-1)[:, :, 0]
        next_query, next_keys = self.heads(self.first, x)
        return Seen(
            features=x[:, 1:],
            grid=(1, *self.model.patch_embed.grid_size),
            scores=attention.mean(dim=1)[:, 1:],
            keys=keys.mean(dim=1)[:, 1:],
            query=next_query[:, :, 0].flatten(1),
            wide_keys=next_keys.transpose(1, 2).flatten(2),
        )

    def read(self, tokens: Tensor, class_token: Tensor) -> Tensor:
        """(B, classes) the reader's logits of ``tokens`` (B, n, D), with a class token (D,) or (B, D) in front."""
        front = class_token.expand(len(tokens), tokens.shape[2])[:, None]
        x = torch.cat([front, tokens], dim=1)
        for block in self.model.blocks[self.first :]:
            x = block(x)
        logits: Tensor = self.model.forward_head(self.model.norm(x))
        return logits

    def mean_class_token(self, read: Iterable[Sequence[Tensor]]) -> Tensor:
        """(D,) over all images."""
        found = torch.cat([self.tokens(images)[1][:, 0] for images, _ in read])
        return found.mean(dim=0)


# ---- scores ----------------------------------------------------------------------------------------------------------


def entries(keeps: Sequence[float]) -> dict[tuple[str, float], list[str]]:
    """Settings of every selector and share; of `random` one for every seed."""
    found: dict[tuple[str, float], list[str]] = {}
    for name in sorted(set(selectors()) - LEFT_OUT):
        for keep in keeps:
            text = f"{name}:keep={keep}"
            further = [f"seed={seed}" for seed in SEEDS] if name == "random" else [WITHOUT_TEXT.get(name, "")]
            found[name, keep] = [",".join(filter(None, (text, each))) for each in further]
    return found


@dataclass(frozen=True)
class Right:
    """Answers of the reader to every image.

    Attributes:
        all_tokens, whole: (images,) 1 where the reader of all tokens, and the model as it is, are right.
        chosen: by selector and share (images,) the share of settings that are right.
        same: the same, for the class that the reader finds in all tokens.
        counts: tokens that were read.
        spread: of `random`, the least and the largest top-1 of its seeds.
    """

    all_tokens: Tensor
    whole: Tensor
    chosen: Mapping[tuple[str, float], Tensor]
    same: Mapping[tuple[str, float], Tensor]
    counts: Mapping[tuple[str, float], int]
    spread: Mapping[float, tuple[float, float]]


@torch.inference_mode()
def answers(tower: Tower, read: Iterable[Sequence[Tensor]], class_token: Tensor, keeps: Sequence[float]) -> Right:
    """Select from every image in every way, and read."""
    settings = entries(keeps)
    configs = {text: parse_selector(text) for texts in settings.values() for text in texts}
    right: dict[str, list[Tensor]] = {text: [] for text in configs}
    same: dict[str, list[Tensor]] = {text: [] for text in configs}
    counts: dict[str, int] = {}
    everything, whole = [], []
    for images, labels in read:
        seen = tower.seen(images)
        found = tower.read(seen.features, class_token).argmax(dim=1)
        everything.append(found == labels)
        whole.append(tower.model(images).argmax(dim=1) == labels)
        for text, config in configs.items():
            choices = config.select(seen)
            tokens = torch.stack([choice.of(own) for choice, own in zip(choices, seen.features, strict=True)])
            told = tower.read(tokens, class_token).argmax(dim=1)
            right[text].append(told == labels)
            same[text].append(told == found)
            counts[text] = tokens.shape[1]
    draws = {keep: [torch.cat(right[text]).double().mean() for text in settings["random", keep]] for keep in keeps}

    def over(kept: Mapping[str, list[Tensor]]) -> dict[tuple[str, float], Tensor]:
        return {
            key: torch.stack([torch.cat(kept[text]).double() for text in texts]).mean(dim=0)
            for key, texts in settings.items()
        }

    return Right(
        torch.cat(everything).double(),
        torch.cat(whole).double(),
        over(right),
        over(same),
        {key: counts[texts[0]] for key, texts in settings.items()},
        {keep: (100 * float(min(own)), 100 * float(max(own))) for keep, own in draws.items()},
    )


def paired(own: Tensor, other: Tensor) -> tuple[float, float]:
    """The mean difference in points, and its standard error.

    Example:
        >>> paired(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        (25.0, 25.0)
    """
    difference = own.double() - other.double()
    return 100 * float(difference.mean()), 100 * float(difference.std()) / len(difference) ** 0.5


def rows_of(right: Right) -> list[dict[str, Any]]:
    """A row for every selector and share."""
    return [
        {
            "selector": name,
            "keep": keep,
            "tokens": right.counts[name, keep],
            "top1": 100 * float(own.mean()),
            "same": 100 * float(right.same[name, keep].mean()),
            "from_all": paired(own, right.all_tokens),
            "from_random": paired(own, right.chosen["random", keep]),
            "from_pool": paired(own, right.chosen["pool", keep]),
        }
        for (name, keep), own in right.chosen.items()
    ]


def markdown(rows: Sequence[Mapping[str, Any]], keeps: Sequence[float], column: str) -> str:
    """A table of one difference: a line for each selector, the one that keeps most at the smallest share first.

    Example:
        >>> row = {"selector": "pool", "keep": 0.5, "from_all": (-1.0, 0.25)}
        >>> print(markdown([row], [0.5], "from_all"))
        | selector | 0.5 |
        |---|---|
        | `pool` | -1.0 ± 0.2 |
    """
    cells = {(row["selector"], row["keep"]): row[column] for row in rows}
    names = sorted({row["selector"] for row in rows}, key=lambda name: -cells[name, keeps[-1]][0])
    lines = ["| selector | " + " | ".join(f"{keep:g}" for keep in keeps) + " |", "|---" * (1 + len(keeps)) + "|"]
    for name in names:
        found = [cells[name, keep] for keep in keeps]
        lines.append(f"| `{name}` | " + " | ".join(f"{value:+.1f} ± {error:.1f}" for value, error in found) + " |")
    return "\n".join(lines)


# ---- command line ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def readers(model: nn.Module, photos: Any, batch_size: int, limit: int | None) -> list[str]:
    """Top-1 of readers of one to four blocks with all tokens, on the photographs that are chosen on."""
    found = []
    for count in READERS:
        tower = Tower(model, count)
        mean = tower.mean_class_token(batches(photos, batch_size, limit=limit))
        right, whole = [], []
        for images, labels in batches(photos, batch_size, limit=limit):
            _, x = tower.tokens(images)
            right.append(tower.read(x[:, 1:], mean).argmax(dim=1) == labels)
            whole.append(tower.read(x[:, 1:], x[:, 0]).argmax(dim=1) == labels)
        top1, own = (100 * float(torch.cat(part).double().mean()) for part in (right, whole))
        found.append(f"{count} blocks read: top-1 {top1:.1f} of all patches and the mean class token, {own:.1f} as is")
    return found


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="a ViT of timm with a class token")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--chosen-on", required=True, help="photographs that the mean class token is of")
    parser.add_argument("--data", help="photographs that are scored")
    parser.add_argument("--blocks", type=int, default=3, help="that read")
    parser.add_argument("--readers", action="store_true", help="how well 1 to 4 blocks read, on --chosen-on")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    machine.set_threads(arguments.threads)
    model = create_model(arguments.model, pretrained=False)
    load_checkpoint(model, arguments.checkpoint)
    model.eval()

    def photos(source: str) -> Any:
        found = load_images(source)
        found.transform = eval_transform(model)
        return found

    if arguments.readers:
        print(*readers(model, photos(arguments.chosen_on), arguments.batch_size, arguments.limit), sep="\n")
        return
    if arguments.data is None:
        parser.error("give --data, or --readers")
    tower = Tower(model, arguments.blocks)
    with torch.inference_mode():
        mean = tower.mean_class_token(batches(photos(arguments.chosen_on), arguments.batch_size, limit=arguments.limit))
    read = batches(photos(arguments.data), arguments.batch_size, limit=arguments.limit)
    right = answers(tower, read, mean, KEEPS)
    rows = rows_of(right)
    whole, everything = (100 * float(one.mean()) for one in (right.whole, right.all_tokens))
    record = {"command": "selectors", "environment": machine.environment(), "model": arguments.model}
    record |= {"blocks": arguments.blocks, "images": len(right.whole), "top1": whole, "top1_all_tokens": everything}
    write_json(arguments.json, {**record, "random_seeds": right.spread, "rows": rows})
    print(f"{arguments.model}: top-1 {whole:.1f} as it is, {everything:.1f} where the reader sees all patches\n")
    for column in ("from_all", "from_random", "from_pool"):
        print(f"{column.replace('_', ' ')}\n\n{markdown(rows, KEEPS, column)}\n")
    for keep, (least, most) in right.spread.items():
        counts = ", ".join(f"{name} {right.counts[name, keep]}" for name in ("random", "pool"))
        print(f"keep {keep:g}: tokens {counts}; seeds of random {least:.1f} to {most:.1f}")


if __name__ == "__main__":
    from_shell(main)
