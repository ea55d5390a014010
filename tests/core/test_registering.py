"""A folder whose files enter themselves into a table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tiny
import vitrim
from vitrim.core import registry
from vitrim.core.tables import discover, enter, entry_of
from vitrim.data import readers as data_readers
from vitrim.data.readers import readers
from vitrim.tasks.base import TASKS
from vitrim.training import objectives
from vitrim.training.objectives import learned

CELL = """
import torch, vitrim
from vitrim.core.selection import Choice
from vitrim.data.readers import register_reader
from vitrim.tasks import register_task
from vitrim.tasks.classification import Classification
from vitrim.training.objectives import learns

class Half(vitrim.StagedConfig):
    name = "half_of_a_cell"
    keep_rate: float = KEPT

@vitrim.register(Half)
class HalfReducer(vitrim.ScorerReducer[Half]):
    site = "before"
    def score(self, x, attention, state):
        return x[:, state.num_prefix:].norm(dim=-1)

@learns(Half)
def losses(step, reduction):
    return {"total": KEPT}

@vitrim.register_selector
class Few(vitrim.Selector):
    name = "few_of_a_cell"
    def select(self, seen):
        return [Choice(torch.arange(1)) for _ in seen.features]

@register_task
class Mine(Classification):
    name = "task_of_a_cell"
    kept = KEPT

@register_reader("reader_of_a_cell")
def read(path, *, split=None):
    return KEPT

class Block(torch.nn.Module): ...
class Model(torch.nn.Module): ...

@vitrim.register_host(f"{__name__}.Model")
class MyHost(vitrim.Host):
    name = str(KEPT)
"""


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tables = [(registry, "_METHODS"), (registry, "_REDUCERS"), (registry, "_SELECTORS")]
    tables += [(data_readers, "_READERS"), (objectives, "_LEARNED")]
    for package in ("methods", "selectors", "data.readers", "training.objectives"):
        discover(f"vitrim.{package}")  # once: a copy of a table would lose what it enters
    for place, name in tables:
        monkeypatch.setattr(place, name, dict(getattr(place, name)))
    monkeypatch.setattr(registry._HOSTS, "entries", dict(registry._HOSTS.entries))
    yield
    TASKS.pop("task_of_a_cell", None)


def test_a_cell_of_a_notebook_may_run_twice(own_tables: None) -> None:
    """As Jupyter runs it: in the namespace of a module, whose classes are then new ones of the same names."""
    cell = {"__name__": "notebook"}
    for kept in (0.5, 0.25):
        exec(CELL.replace("KEPT", str(kept)), cell)
        assert registry.parse_method("half_of_a_cell").keep_rate == kept
        assert type(registry.parse_selector("few_of_a_cell")) is cell["Few"]
        assert TASKS["task_of_a_cell"].kept == kept
        assert readers()["reader_of_a_cell"]["classification"]("x") == kept
        assert registry.find_host(cell["Model"]()).name == str(kept)
        assert learned(cell["Half"]()).losses(None, None) == {"total": kept}
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "half_of_a_cell:blocks=[1]")
    model(tiny.images())
    assert reduction.state.num_patches == 9
    reducer, again = "@vitrim.register(Half)", "@vitrim.reduces(Half)"
    exec(CELL[CELL.index(reducer) : CELL.index("@vitrim.register_selector")].replace(reducer, again), cell)
    assert registry._REDUCERS[cell["Half"]] is cell["HalfReducer"]


def test_the_same_name_from_another_place_is_refused() -> None:
    def made(module: str, name: str) -> type:
        return type(name.rpartition(".")[2], (), {"__module__": module, "__qualname__": name})

    table = {"a": made("one", "A")}
    for other in (made("two", "A"), made("one", "B"), made("one", "Outer.A")):
        with pytest.raises(ValueError, match="thing is registered twice"):
            enter(table, "a", other, "thing")
    again = made("one", "A")
    enter(table, "a", again, "thing")
    assert table == {"a": again}
    nameless = {"a": lambda: 1}
    with pytest.raises(ValueError, match="thing is registered twice"):
        enter(nameless, "a", lambda: 2, "thing")
    with pytest.raises(ValueError, match="thing is registered twice"):
        enter({"a": 1}, "a", 1, "thing")


def test_the_nearest_class_counts() -> None:
    assert entry_of({object: 0, int: 1}, bool) == 1
    assert entry_of({object: 0, bool: 2, int: 1}, bool) == 2
    assert entry_of({int: 1}, str) is None
