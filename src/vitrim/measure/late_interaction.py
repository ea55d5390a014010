"""Late interaction of queries with pages: every token is a vector, and scores compare them one by one.

MaxSim is that of ColBERT (Khattab and Zaharia 2020) and ColPali (Faysse et al. 2024). Token pooling is the hierarchical
one of Clavié, Chaffin and Adams 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vitrim.core.selection import descending
from vitrim.errors import check_installed

RANKED = 5
"""Pages of a ranking that count."""


def max_similarity(queries: Sequence[Tensor], pages: Sequence[Tensor]) -> Tensor:
    """(Q, P) scores of ``pages`` for ``queries``, (n, D) vectors each: for every vector of a query the largest inner
    product with one of the page, summed. In at least float32.

    Example:
        >>> query, page = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> max_similarity([query], [page, page[:1]])
        tensor([[1.8000, 1.0000]])
    """
    among = torch.cat(list(pages))
    among = among.to(torch.promote_types(among.dtype, torch.float32))
    lengths = [len(page) for page in pages]
    scores = []
    # Query by query, which bounds the memory.
    for query in queries:
        products = among @ query.to(among).T
        scores.append(torch.stack([own.amax(dim=0).sum() for own in products.split(lengths)]))
    return torch.stack(scores)


def ndcg(scores: Tensor, relevant: Tensor, count: int = RANKED) -> Tensor:
    """(Q,) float64 nDCG of the first ``count`` pages by ``scores`` (Q, P), where pages are ``relevant`` (Q, P) or not.

    Every query has a relevant page. A page at rank i, from 1, gains 1 / log2(i + 1); of equal scores, the first page
    comes first.

    Example:
        >>> ndcg(torch.tensor([[0.3, 0.2, 0.1]]), torch.tensor([[False, True, False]])).round(decimals=4)
        tensor([0.6309], dtype=torch.float64)
    """
    ranked = relevant.gather(1, descending(scores)[:, :count]).double()
    gains = 1.0 / torch.arange(2, ranked.shape[1] + 2, dtype=torch.float64).log2()
    best = torch.stack([gains[: int(number)].sum() for number in relevant.sum(dim=1)])
    return (ranked @ gains) / best


def pooled(vectors: Tensor, factor: int) -> Tensor:
    """About ``len(vectors) / factor`` unit vectors in place of the ``vectors`` (n, D) of a page: means of clusters.

    As `HierarchicalTokenPooling` of sentence-transformers. Clusters are Ward's, of cosine distances, in the order of
    their first vectors; at least one, at most ``max(n // factor, 1)``: equal distances may give fewer.

    Example:
        >>> page = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [-1.0, 0.0]])
        >>> pooled(page, 2)
        tensor([[ 0.7474,  0.6644],
                [-1.0000,  0.0000]])
    """
    check_installed("pooling of vectors", "scipy")
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    most = max(len(vectors) // factor, 1)
    if most == len(vectors):
        return vectors
    unit = normalize(vectors.double(), dim=1)
    labels = fcluster(linkage(pdist(unit.cpu().numpy(), "cosine"), "ward"), most, "maxclust")
    number = {label: place for place, label in enumerate(dict.fromkeys(labels.tolist()))}
    cluster = torch.tensor([number[label] for label in labels.tolist()], device=vectors.device)
    # A sum points where the mean does.
    sums = unit.new_zeros(len(number), unit.shape[1]).index_add(0, cluster, unit)
    return normalize(sums, dim=1).to(vectors.dtype)
