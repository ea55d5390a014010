"""Pages found by queries: scores, vectors and bytes are those of twenty plain lines on the library's own vectors."""

from __future__ import annotations

import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrim
from cli_runs import runner
from tiny_retrievers import RETRIEVERS, WIDTH, processor
from vitrim.data.pages import PageDataset
from vitrim.errors import DataError
from vitrim.measure.late_interaction import max_similarity, ndcg, pooled

QUERIES = ["the red page", "the blue page", None, "the red page", "the image.", "page blue"]
"""Of six rows; the first and the last show the same page."""


def png(row: int) -> bytes:
    pixels = np.random.default_rng(row).integers(0, 256, (20 + row, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := BytesIO(), "png")
    return file.getvalue()


PNGS = [*map(png, range(5)), png(0)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "pages.parquet"
    images = [{"bytes": page, "path": None} for page in PNGS]
    pq.write_table(pa.table({"image": images, "query": pa.array(QUERIES, pa.string())}), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ColPali with its processor."""
    path = tmp_path_factory.mktemp("colpali")
    model: Any = RETRIEVERS["colpali"].create()
    model.save_pretrained(path)
    processor().save_pretrained(path)
    return path


def maxsim(query: Tensor, page: Tensor) -> float:
    return sum(max(row) for row in (query @ page.T).tolist())


def gain(ranking: list[int], relevant: set[int]) -> float:
    """nDCG@5."""
    found = sum(1 / math.log2(place + 2) for place, page in enumerate(ranking[:5]) if page in relevant)
    return found / sum(1 / math.log2(place + 2) for place in range(min(5, len(relevant))))


def by_hand(select: str | None = None, method: str | None = None, factor: int | None = None) -> dict[str, float]:
    """A row's expected numbers, by the library's model and processor, page by page."""
    model: Any = RETRIEVERS["colpali"].create()
    own = processor()

    def vectors(**given: Any) -> Tensor:
        inputs = own(**given)
        inputs.pop("labels", None)
        with torch.no_grad():
            return model(**inputs).embeddings[0]  # type: ignore[no-any-return]

    texts = list(dict.fromkeys(text for text in QUERIES if text))
    queries = [vectors(text=[text]) for text in texts]
    if select is not None or method is not None:
        vitrim.reduce_(model, method, select=select, compact=True)
    pages = [vectors(images=[Image.open(BytesIO(page)).convert("RGB")]) for page in PNGS[:5]]
    if factor is not None:
        pages = [pooled(page, factor) for page in pages]
    relevant = {text: {row % 5 for row, own in enumerate(QUERIES) if own == text} for text in texts}
    gains = []
    for text, query in zip(texts, queries, strict=True):
        ranking = sorted(range(5), key=lambda page: -maxsim(query, pages[page]))
        gains.append(gain(ranking, relevant[text]))
    count = sum(map(len, pages)) / 5
    return {"ndcg5": sum(gains) / len(gains), "vectors": count, "bytes": count * WIDTH * 4}


def test_rows_are_those_of_plain_lines(table: Path) -> None:
    model: Any = RETRIEVERS["colpali"].create()
    model.processor = processor()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    selects = ["divprune:tokens=4", "pool:tokens=4", "resize:tokens=9"]
    seen: list[tuple[int, int | None]] = []
    report = vitrim.evaluate(
        model,
        None,
        vitrim.PageData(table, select=selects, pool_factors=[3], batch_size=2),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [row.method for row in report.rows] == ["dense", "vectors pooled by 3", *selects]
    wanted = [by_hand(), by_hand(factor=3), *(by_hand(select) for select in selects)]
    for row, expected in zip(report.rows, wanted, strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert (row["images"], row["queries"]) == (5, 4)
    assert [row["vectors"] for row in report.rows] == [40, 13, 8, 8, 13]
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert vitrim.get_reduction(model) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_methods_go_with_selectors_and_a_reduced_model_beside_its_dense_self(table: Path) -> None:
    model: Any = RETRIEVERS["colpali"].create()
    model.processor = processor()
    report = vitrim.evaluate(model, ["none", "tome:r=2"], vitrim.PageData(table, select=["divprune:tokens=4"]))
    assert [row.method for row in report.rows] == ["dense", "divprune:tokens=4", "tome:r=2 + divprune:tokens=4"]
    expected = by_hand("divprune:tokens=4", "tome:r=2")
    assert {name: report.rows[2][name] for name in expected} == pytest.approx(expected, abs=1e-9)
    vitrim.reduce_(model, "tome:r=2", select="divprune:tokens=4")
    again = vitrim.evaluate(model, None, table)
    assert [dict(row) for row in again.rows] == [dict(report.rows[0]), dict(report.rows[2])]
    alone = vitrim.evaluate(model, "tome:r=2", table)
    assert alone.rows[-1]["vectors"] == report.rows[-1]["vectors"]


def test_the_command_prints_vectors_and_bytes_per_page(
    folder: Path,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--task", "retrieval", "--data", str(table), "-m", "tome:r=2", "--json", str(tmp_path / "found.json")]
    code, out, _ = runner(monkeypatch, capsys)("eval", f"hf:{folder}", *given, "--pool-factor", "2")
    assert code == 0
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["task"] == "retrieval"
    assert record["data"] | {"source": None} == {
        "source": None, "split": None, "images": 5, "queries": 4, "batch_size": 32
    }  # fmt: skip
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == ["dense", "vectors pooled by 2", "tome:r=2"]
    expected = by_hand(method="tome:r=2")
    assert {name: rows["tome:r=2"][name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert (rows["tome:r=2"]["vectors"], rows["tome:r=2"]["bytes"]) == (32, 32 * WIDTH * 4)
    lines = [line.replace("┃", "│").replace("│", " ").split() for line in out.splitlines()]
    assert ["method", "nDCG@5", "change", "vectors", "bytes"] in lines
    assert any(line[:1] == ["tome:r=2"] and line[-2:] == ["32", "1024"] for line in lines)


def test_a_limit_takes_rows_and_a_page_without_its_query_is_passed_over(table: Path) -> None:
    data = vitrim.open_data(table, task="retrieval", limit=3)
    assert isinstance(data, PageDataset)
    assert (len(data), data.texts, data.relevant.tolist()) == (3, ["the red page", "page blue"], [[True, False]] * 2)
    whole = vitrim.open_data(table, task="retrieval")
    assert whole.pages == [0, 1, 2, 3, 4]
    assert whole.relevant.astype(int).tolist() == [
        [1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"no page in this part of .* has a query"):
        whole.part([2])
    with pytest.raises(DataError, match="memory has 5 pages and 1 queries"):
        PageDataset(PNGS[:5], queries=["a"])
    with pytest.raises(DataError, match="no page of memory has a query"):
        PageDataset(PNGS[:2], queries=["", None])


@pytest.mark.parametrize("seed", range(4))
def test_scores_and_gains_are_those_of_plain_lines(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = [torch.randn(n, 5, generator=generator) for n in (3, 1, 7, 4, 4, 2, 6)]
    queries = [torch.randn(n, 5, generator=generator) for n in (2, 5, 1)]
    found = max_similarity(queries, pages)
    torch.testing.assert_close(found, torch.tensor([[maxsim(q, p) for p in pages] for q in queries]))
    half = max_similarity([q.bfloat16() for q in queries], [p.bfloat16() for p in pages])
    assert half.dtype == torch.float32
    relevant = torch.rand(3, 7, generator=generator) < 0.4
    relevant[torch.arange(3), torch.tensor([6, 0, seed])] = True
    rankings = [sorted(range(7), key=lambda page: -row[page]) for row in found.tolist()]
    sets = [set(row.nonzero().flatten().tolist()) for row in relevant]
    assert ndcg(found, relevant).tolist() == pytest.approx(list(map(gain, rankings, sets)))
    best = relevant.float()
    assert ndcg(best, relevant).tolist() == pytest.approx([1.0] * 3)
    assert ndcg(torch.zeros(1, 7), torch.eye(7, dtype=torch.bool)[1:2]).item() == pytest.approx(1 / math.log2(3))


def test_ndcg_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(5)
    scores, relevant = torch.rand(6, 9, generator=generator), torch.rand(6, 9, generator=generator) < 0.5
    relevant[:, 0] = True
    assert ndcg(scores, relevant).mean().item() == pytest.approx(metrics.ndcg_score(relevant, scores, k=5))


@pytest.mark.parametrize("factor", [2, 3, 7, 50])
def test_pooled_vectors_are_means_of_wards_clusters(factor: int) -> None:
    """Ward's clusters by the recurrence of Lance and Williams, in plain lines."""
    vectors = torch.nn.functional.normalize(torch.randn(17, 4, generator=torch.Generator().manual_seed(3)), dim=1)
    unit = vectors.double()
    groups = [[place] for place in range(len(unit))]
    squares = {frozenset((a, b)): float(1 - unit[a] @ unit[b]) ** 2 for a in range(17) for b in range(a)}
    ids = list(range(17))
    while len(groups) > max(17 // factor, 1):
        pair = min((frozenset((a, b)) for a in ids for b in ids if a < b), key=lambda one: squares[one])
        first, second = sorted(pair)
        n, m = (len(groups[ids.index(one)]) for one in (first, second))
        new = max(ids) + 1
        for other in set(ids) - pair:
            k = len(groups[ids.index(other)])
            squares[frozenset((new, other))] = (
                (n + k) * squares[frozenset((first, other))]
                + (m + k) * squares[frozenset((second, other))]
                - k * squares[pair]
            ) / (n + m + k)
        joined = sorted(groups[ids.index(first)] + groups[ids.index(second)])
        groups = [group for one, group in zip(ids, groups, strict=True) if one not in pair] + [joined]
        ids = [one for one in ids if one not in pair] + [new]
    wanted = torch.stack([unit[group].mean(dim=0) for group in sorted(groups)])
    torch.testing.assert_close(pooled(vectors, factor), torch.nn.functional.normalize(wanted, dim=1).float())
    assert pooled(vectors[:1], factor) is not None
    assert torch.equal(pooled(vectors[:1], factor), vectors[:1])


def test_what_does_not_fit_is_refused_in_one_line(table: Path, tmp_path: Path) -> None:
    model: Any = RETRIEVERS["colpali"].create()
    with pytest.raises(vitrim.VitrimError, match=r"cannot read how pages and queries are .*; set model\.processor"):
        vitrim.evaluate(model, None, table)
    model.processor = processor()
    with pytest.raises(vitrim.VitrimError, match="leave files, image sizes, out, decisions and predictions out"):
        vitrim.evaluate(model, None, table, out=tmp_path / "out")
    with pytest.raises(vitrim.VitrimError, match="vitrim eval measures that"):
        vitrim.compare(model, "tome:r=2", table)
    with pytest.raises(vitrim.VitrimError, match="pool_factors"):
        vitrim.evaluate(model, None, vitrim.PageData(table, pool_factors=[1]))
    with pytest.raises(vitrim.VitrimError, match="expected a source of pages with queries or a PageDataset"):
        vitrim.evaluate(model, None, [(torch.zeros(1, 3, 24, 24), torch.tensor([0]))])
    with pytest.raises(DataError, match=r"no 'text' in .*; its columns: image"):
        vitrim.evaluate(model, None, vitrim.PageData(table, label_column="text"))
    import timm

    vit = timm.create_model("test_vit", num_classes=3)
    with pytest.raises(vitrim.VitrimError, match="predicts labels of whole images: leave task retrieval out"):
        vitrim.evaluate(vit, None, vitrim.PageData(table, task="retrieval"))
    batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
    with pytest.raises(vitrim.VitrimError, match=r"^selectors and pooling are for retrievers of pages"):
        vitrim.evaluate(vit, None, vitrim.PageData(batches, select=["pool"]))
    with torch.no_grad():
        model.embedding_proj_layer.weight[0, 0] = torch.nan
    with pytest.raises(vitrim.VitrimError, match="not finite"):
        vitrim.evaluate(model, None, table)
