"""Every selector of image tokens on photographs: does the class survive where only the selected tokens are read?

    python benchmarks/image_selectors.py --model vit_tiny_patch16_224 --checkpoint WEIGHTS \\
        --chosen-on PHOTOS --data HELD_OUT

No language model with weights is at hand, so the tower is cut in two: its first blocks are the tower, and the last
blocks, norm and classifier read, as a language model would, what the selector leaves. The class token, which has seen
all patches, does not go on: in its place the reader gets its mean over PHOTOS, the same for every image, so that what
it answers comes from the selected tokens. Nothing is trained. HELD_OUT is scored once.

A linear probe on the mean of the selected tokens would say less: means of equal cells have the mean of all tokens, so
`pool` loses nothing there whatever it blurs, and a random draw is an unbiased estimate of that mean.

Selectors see the tokens as they leave the tower, without a connector, and the attention that they ask for: of the
tower's last block (`read`), and for `prumerge` query and keys of the block behind it, as released. There is no
question: `dart` has pivots of the image alone, `cdpruner` diversity alone (text=none). `visionzip` hands no class token
on. Left out are `evs` and `vcast`, for videos, and `resize` and `pixelprune`, which change what the tower reads.
`random` is the mean of ten seeds.

Every number is a difference of top-1 in points with the standard error of the mean over images, paired image by image:
from the same reader with all tokens, from `random` (of an image, the share of its draws that are right), and from
`pool`, which keeps fewer tokens where no rectangle has as many cells. It says nothing about language.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from script import Row, from_shell, table, write_json
from vitrim.core.registry import parse_selector, selectors
from vitrim.core.selection import Seen
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines import machine
from vitrim.loading import ModelSpec

KEEPS = (0.5, 0.25, 0.11)
SEEDS = range(10)
WITHOUT_TEXT = {"dart": "text_pivots=0", "cdpruner": "text=none"}
LEFT_OUT = {"evs", "vcast", "resize", "pixelprune"}


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
    """

    all_tokens: Tensor
    whole: Tensor
    chosen: Mapping[tuple[str, float], Tensor]
    same: Mapping[tuple[str, float], Tensor]
    counts: Mapping[tuple[str, float], int]


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
    )


def paired(own: Tensor, other: Tensor) -> tuple[float, float]:
    """The mean difference in points, and its standard error.

    Example:
        >>> paired(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        (25.0, 25.0)
    """
    difference = own.double() - other.double()
    return 100 * float(difference.mean()), 100 * float(difference.std()) / len(difference) ** 0.5


def rows_of(right: Right) -> list[Row]:
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


def markdown(rows: Sequence[Row], keeps: Sequence[float], column: str) -> str:
    """A table of one difference: a line for each selector, the one that keeps most at the smallest share first.

    Example:
        >>> print(markdown([{"selector": "pool", "keep": 0.5, "from_all": (-1.0, 0.25)}], [0.5], "from_all"))
        | selector | 0.5 |
        |---|---|
        | `pool` | -1.0 ± 0.2 |
    """
    values = {(row["selector"], row["keep"]): row[column] for row in rows}
    names = sorted({row["selector"] for row in rows}, key=lambda name: -values[name, keeps[-1]][0])
    cells = ((f"`{name}`", *("{:+.1f} ± {:.1f}".format(*values[name, keep]) for keep in keeps)) for name in names)
    return table(["selector", *(f"{keep:g}" for keep in keeps)], cells)


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="a ViT of timm with a class token")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--chosen-on", required=True, help="photographs that the mean class token is of")
    parser.add_argument("--data", required=True, help="photographs that are scored")
    parser.add_argument("--blocks", type=int, default=3, help="that read")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    machine.set_threads(options.threads)
    model = ModelSpec(options.model, checkpoint=options.checkpoint).load().model.eval()

    def photos(source: str) -> Iterable[Sequence[Tensor]]:
        dataset = load_images(source)
        dataset.transform = eval_transform(model)
        return batches(dataset, options.batch_size, limit=options.limit)

    tower = Tower(model, options.blocks)
    with torch.inference_mode():
        mean = tower.mean_class_token(photos(options.chosen_on))
    right = answers(tower, photos(options.data), mean, KEEPS)
    rows = rows_of(right)
    whole, everything = (100 * float(each.mean()) for each in (right.whole, right.all_tokens))
    record = {"command": "image_selectors", "environment": machine.environment(), "model": options.model}
    write_json(options.json, {**record, "top1": whole, "top1_all_tokens": everything, "rows": rows})
    print(f"{options.model}: top-1 {whole:.1f} as it is, {everything:.1f} where the reader sees all patches\n")
    for column in ("from_all", "from_random", "from_pool"):
        print(f"{column.replace('_', ' ')}\n\n{markdown(rows, KEEPS, column)}\n")


if __name__ == "__main__":
    from_shell(main)
