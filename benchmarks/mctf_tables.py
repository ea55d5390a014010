"""The FLOPs columns of MCTF's Tables C and D (DeiT-T and DeiT-S, r = 1..20) by vitrim's profiler, row by row.

    python benchmarks/mctf_tables.py

The printed numbers are those of the published procedure (``attention_map=shared``). The last column is what the default
(``recomputed``) executes: a fused kernel on all tokens and one more pass over q k^T.
"""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer

import vitrim
from vitrim.profiling.macs import profile

TABLE = Path(__file__).parents[1] / "tests" / "golden" / "tables" / "mctf_table_c_d.csv"
GEOMETRY = {"DeiT-T": (192, 3), "DeiT-S": (384, 6)}


def gmacs(model: VisionTransformer, method: vitrim.MethodConfig | None) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrim.ReductionWarning)  # the last blocks cannot fuse r = 17 and more
        return profile(model, method, torch.zeros(1, 3, 224, 224)).macs.total / 1e9


def main() -> int:
    models = {name: VisionTransformer(embed_dim=dim, num_heads=heads) for name, (dim, heads) in GEOMETRY.items()}
    wrong = 0
    print("model   r     printed  counted  recomputed")
    for row in csv.DictReader(TABLE.open()):
        if row["table"] == "D":
            continue  # repeats the FLOPs of C
        model, r = models[row["model"]], row["r"]
        shared = recomputed = None
        if r != "base":
            shared = vitrim.MCTF(r=int(r), attention_map="shared")
            recomputed = vitrim.MCTF(r=int(r))
        counted = gmacs(model, shared)
        same = f"{counted:.2f}" == row["gflops"]
        wrong += not same
        executed = gmacs(model, recomputed)
        print(
            f"{row['model']:7} {r:5} {row['gflops']:7}  {counted:7.4f}  {executed:10.4f}{'' if same else '  DIFFERS'}"
        )
    print("all rows agree" if wrong == 0 else f"{wrong} rows differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
