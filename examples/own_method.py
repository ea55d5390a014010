"""A method of your own, complete: keep the patches whose tokens are longest. The command line takes it, too:

PYTHONPATH=examples python -c "import own_method; from vitrim.cli import main; main()" profile test_vit -m longest
"""

import vitrim


class Longest(vitrim.StagedConfig):
    """Options: ``keep_rate``, ``blocks`` and ``rule`` are inherited."""

    name = "longest"


@vitrim.register(Longest)
class LongestReducer(vitrim.ScorerReducer[Longest]):
    site = "before"  # it acts on the input of a block

    def score(self, x, attention, state):
        return x[:, state.num_prefix :].norm(dim=-1)  # tokens (B, N, C) to one number per patch, (B, P)


if __name__ == "__main__":
    import timm
    import torch

    model = timm.create_model("test_vit", num_classes=10).eval()
    reduction = vitrim.reduce_(model, "longest:keep_rate=0.5", record=True)
    print(model(torch.randn(1, 3, 160, 160)).shape, reduction.tokens_per_block)
