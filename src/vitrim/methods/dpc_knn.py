"""DPC-KNN: density peak clustering of the patches (Du et al. 2016; Zeng et al., TCFormer, CVPR 2022)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import density_peaks, distances, merge_clusters, nearest_centre
from vitrim.core.method import StagedConfig
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.tokens import TokenState, decision_dtype


class DPCKNN(StagedConfig):
    """Merge the patches around the K density peaks, as the comparative study and TCFormer do.

    Formulas and deviations are in docs/methods/dpc_knn.md.

    Example:
        >>> DPCKNN(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "dpc_knn"
    paper = "Study on density peaks clustering based on k-nearest neighbors (2016); TCFormer (CVPR 2022)"
    kind = "merge"

    k_neighbors: int = Field(5, ge=1, description="neighbours that make up a density, the patch itself included")
    equal_weight: bool = Field(False, description="plain means, no learned score")
    density_noise: float = Field(0.0, ge=0.0, description="uniform noise added to the densities; 1e-6 as published")
    epsilon: float = Field(0.0, ge=0.0, description="added to the sum of a cluster's weights; 1e-6 as published")

    def obstacle(self) -> str | None:
        return "density_noise is drawn anew in every forward; leave it out" if self.density_noise > 0.0 else None


@register(DPCKNN)
class DPCKNNReducer(Reducer[DPCKNN]):
    """Parameters: the linear ``score`` (1, C), unless all weights are equal."""

    site = "before"
    spares_block = True

    def __init__(self, config: DPCKNN, layer: Layer) -> None:
        super().__init__(config, layer)
        self.score = None if config.equal_weight else nn.Linear(layer.dim, 1)
        if self.score is not None:
            nn.init.zeros_(self.score.weight)
            nn.init.zeros_(self.score.bias)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        patches = x[:, state.num_prefix :]
        with torch.no_grad():
            distance = distances(patches) / patches.shape[-1] ** 0.5
            density = log_densities(distance, self.config.k_neighbors, self.config.density_noise)
            centres = density_peaks(distance, density, distance.amax(dim=(1, 2), keepdim=True), keep)
            cluster = nearest_centre(distance, centres)
        return merge_clusters(state, centres, cluster, self.shares(patches, cluster, keep))

    def shares(self, patches: Tensor, cluster: Tensor, num_clusters: int) -> Tensor:
        """(B, P) weight of each patch in the mean of its cluster, in at least float32."""
        wide = decision_dtype(patches.dtype)
        if self.score is None:
            score = torch.zeros(cluster.shape, dtype=wide, device=patches.device)
        else:
            score = self.score(patches).squeeze(-1).to(wide)
        # the largest score of an image cancels in the quotient, and exp cannot overflow
        largest = score.detach().amax(dim=1, keepdim=True)
        weight = (score - largest).exp()
        total = weight.new_zeros(weight.shape[0], num_clusters).scatter_add(1, cluster, weight)
        return weight / (total + self.config.epsilon * (-largest).exp()).gather(1, cluster)


def log_densities(distance: Tensor, k_neighbors: int, noise: float = 0.0) -> Tensor:
    """(B, P) logarithm of the density around each patch, by its ``k_neighbors`` in ``distance`` (B, P, P)."""
    neighbours = distance.topk(min(k_neighbors, distance.shape[1]), dim=2, largest=False).values
    # The density is exp of this; only its order counts, and the exponential of far patches would be 0.
    log_density = -neighbours.square().mean(dim=2)
    return (log_density.exp() + noise * torch.rand_like(log_density)).log() if noise > 0.0 else log_density
