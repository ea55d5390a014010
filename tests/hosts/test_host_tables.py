"""The written tables of ``hosts/LIBRARY/__init__.py``: they name what there is, and everything that there is."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import timm
from torch import nn

import vitrim
from vitrim.core import registry, tables
from vitrim.core.host import Host, VisionLanguage
from vitrim.core.library import Library
from vitrim.core.plan import Preprocessing
from vitrim.core.registry import ask, hosts, register_library, vision_languages
from vitrim.core.tables import libraries, missing_libraries
from vitrim.hosts.timm.library import TimmLibrary

INSTALLED = sorted(set(libraries()) - set(missing_libraries()))
KINDS: dict[str, Any] = {
    "HOSTS": Host,
    "VISION_LANGUAGE": VisionLanguage,
    "SELECTED": VisionLanguage,
    "LIBRARIES": Library,
}


def written(library: str, table: str) -> dict[str, str]:
    """A table of a library, without what the installed version is too old for."""
    entries = tables.written_table(library, table)
    return {key: place for key, place in entries.items() if tables.needed_version(key, table) is None}


def resolved(library: str, place: str) -> Any:
    file, _, name = place.partition(":")
    return getattr(importlib.import_module(f".{file}", f"vitrim.hosts.{library}"), name)


def modules(library: str) -> list[Any]:
    """The files of a folder."""
    tables.discover(f"vitrim.hosts.{library}")
    prefix = f"vitrim.hosts.{library}."
    return [module for name, module in sys.modules.items() if name.startswith(prefix)]


@pytest.mark.parametrize("library", INSTALLED)
def test_every_entry_is_there(library: str) -> None:
    for table, kind in KINDS.items():
        for key, place in written(library, table).items():
            assert issubclass(resolved(library, place), kind), key
            where, _, name = key.rpartition(".")
            assert key == library or isinstance(getattr(importlib.import_module(where), name), type), key
            assert key.partition(".")[0] == library, "it is looked for in the folder of its library alone"
    assert all(isinstance(resolved(library, place), str) for place in tables.written_table(library, "REFUSED").values())
    assert all(callable(resolved(library, place)) for place in tables.written_table(library, "ON_REDUCE").values())


@pytest.mark.parametrize("library", INSTALLED)
def test_every_family_is_in_its_table(library: str) -> None:
    """What has a name of its own, beside bases that several families share."""
    if any(key.startswith(f"{library}.") for key in tables.not_yet()):
        pytest.skip("some files of the folder cannot be imported")
    for table, kind in KINDS.items():
        places = [*tables.written_table(library, table).values()]
        if kind is VisionLanguage:  # which are in either of two tables
            places += [*tables.written_table(library, "VISION_LANGUAGE").values()]
            places += [*tables.written_table(library, "SELECTED").values()]
        named = {resolved(library, place) for place in places}
        for module in modules(library):
            for value in vars(module).values():
                own = inspect.isclass(value) and issubclass(value, kind) and value.__module__ == module.__name__
                if own and "name" in vars(value) and not value.__name__.startswith("_"):
                    assert value in named or library == "dinov2", value


def test_hosts_and_families_of_vision_language_models_are_listed() -> None:
    for library in INSTALLED:
        assert set(written(library, "HOSTS")) <= set(hosts())
        assert set(written(library, "VISION_LANGUAGE")) <= set(vision_languages())


# ---- hosts and libraries of users ------------------------------------------------------------------------------------


class Mine(nn.Module):
    """A model of no library."""


KEY = f"{Mine.__module__}.{Mine.__qualname__}"


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HOSTS", "_LIBRARIES"):
        monkeypatch.setattr(getattr(registry, name), "entries", dict(getattr(registry, name).entries))


def test_a_library_answers_for_the_models_of_a_user() -> None:
    assert isinstance(ask(Mine()), TimmLibrary)  # whose conventions are everybody's

    @register_library(KEY)
    class MyLibrary(Library):
        def preprocessing(self, model: nn.Module) -> Preprocessing:
            return Preprocessing(channels=1, size=(8, 8))

    assert ask(Mine()).preprocessing(Mine()).size == (8, 8)
    with pytest.raises(vitrim.VitrimError, match=f"library '{KEY}' is registered twice"):
        register_library(KEY)(TimmLibrary)
    for key in ("timm", "timm.models.vision_transformer_sam.VisionTransformerSAM"):
        with pytest.raises(vitrim.VitrimError, match=f"library '{key}' is registered twice"):
            register_library(key)(MyLibrary)


def test_a_library_knows_the_family() -> None:
    model = timm.create_model("test_vit")
    assert ask(model).host is registry.host_of(model)
    assert ask(timm.create_model("test_resnet")).host is None
