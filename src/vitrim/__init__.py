"""vitrim makes Vision Transformers faster by giving them fewer tokens.

    import timm, vitrim
    model = timm.create_model("deit_small_patch16_224", pretrained=True)
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=13))

Every command is also a function: `profile`, `bench`, `compare`, `evaluate`, `show`, `tune`, `optimize`, `analyze`,
`freeze`, `export`, `train`.

Names are resolved on first use, so ``vitrim --help`` does not import torch. Config classes of methods and selectors
(``vitrim.ToMe``, ``vitrim.DivPrune``, ...) come from the registry.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrim.version import __version__ as __version__

if TYPE_CHECKING:
    from vitrim.analysis.analyze import analyze, analyze_records, compare_analyses
    from vitrim.core.assignment import Hard, Soft, merge, prune
    from vitrim.core.attention import Attention, split_heads
    from vitrim.core.block import ReducedBlock, Reducer
    from vitrim.core.host import Host
    from vitrim.core.library import Library
    from vitrim.core.method import Adaptive, MethodConfig, Needs, StagedConfig, Traits, Tunable
    from vitrim.core.plan import HostFacts, Layer
    from vitrim.core.reduce import Reduction, get_reduction, reduce_, reduced, restore_
    from vitrim.core.registry import (
        parse_method,
        parse_selector,
        reduces,
        register,
        register_host,
        register_library,
        register_method,
        register_selector,
    )
    from vitrim.core.schedule import Keep, Remove
    from vitrim.core.scoring import ScorerReducer
    from vitrim.core.selection import Selector
    from vitrim.core.tokens import TokenState, unmerge
    from vitrim.engines.exported import Exported
    from vitrim.engines.prefill import Prompt
    from vitrim.engines.writing import FileSpec
    from vitrim.errors import ReductionWarning, UnsupportedModelError, VitrimError
    from vitrim.hosts.torch.own import OwnBlock, OwnHost
    from vitrim.loading import ModelSpec, PlacedModel, ScoredModel, create_model
    from vitrim.measure.bench import bench
    from vitrim.measure.compare import compare
    from vitrim.measure.evaluation import evaluate
    from vitrim.measure.export import export
    from vitrim.measure.freeze import freeze
    from vitrim.measure.inputs import DataSpec, JudgedData, PageData, ScoredData, open_data
    from vitrim.measure.latency import Budget
    from vitrim.measure.profile import profile
    from vitrim.plots.show import show
    from vitrim.report import Report
    from vitrim.results import FileResults, Pictures, Results, ScoredResults
    from vitrim.training.running import Running
    from vitrim.training.train import train
    from vitrim.tuning.optimize import optimize
    from vitrim.tuning.search import SearchSpec
    from vitrim.tuning.tune import train_grid, tune, tune_grid

__all__ = [
    "Adaptive",
    "Attention",
    "Budget",
    "DataSpec",
    "Exported",
    "FileResults",
    "FileSpec",
    "Hard",
    "Host",
    "HostFacts",
    "JudgedData",
    "Keep",
    "Layer",
    "Library",
    "MethodConfig",
    "ModelSpec",
    "Needs",
    "OwnBlock",
    "OwnHost",
    "PageData",
    "Pictures",
    "PlacedModel",
    "Prompt",
    "ReducedBlock",
    "Reducer",
    "Reduction",
    "ReductionWarning",
    "Remove",
    "Report",
    "Results",
    "Running",
    "ScoredData",
    "ScoredModel",
    "ScoredResults",
    "ScorerReducer",
    "SearchSpec",
    "Selector",
    "Soft",
    "StagedConfig",
    "TokenState",
    "Traits",
    "Tunable",
    "UnsupportedModelError",
    "VitrimError",
    "analyze",
    "analyze_records",
    "bench",
    "compare",
    "compare_analyses",
    "create_model",
    "evaluate",
    "export",
    "freeze",
    "get_reduction",
    "merge",
    "open_data",
    "optimize",
    "parse_method",
    "parse_selector",
    "profile",
    "prune",
    "reduce_",
    "reduced",
    "reduces",
    "register",
    "register_host",
    "register_library",
    "register_method",
    "register_selector",
    "restore_",
    "show",
    "split_heads",
    "train",
    "train_grid",
    "tune",
    "tune_grid",
    "unmerge",
]

_NAMES = {
    "vitrim.analysis.analyze": ("analyze", "analyze_records", "compare_analyses"),
    "vitrim.core.assignment": ("Hard", "Soft", "merge", "prune"),
    "vitrim.core.attention": ("Attention", "split_heads"),
    "vitrim.core.block": ("ReducedBlock", "Reducer"),
    "vitrim.core.host": ("Host",),
    "vitrim.core.library": ("Library",),
    "vitrim.core.method": ("Adaptive", "MethodConfig", "Needs", "StagedConfig", "Traits", "Tunable"),
    "vitrim.core.plan": ("HostFacts", "Layer"),
    "vitrim.core.reduce": ("Reduction", "get_reduction", "reduce_", "reduced", "restore_"),
    "vitrim.core.registry": (
        *("parse_method", "parse_selector", "reduces", "register"),
        *("register_host", "register_library", "register_method", "register_selector"),
    ),
    "vitrim.core.schedule": ("Keep", "Remove"),
    "vitrim.core.scoring": ("ScorerReducer",),
    "vitrim.core.selection": ("Selector",),
    "vitrim.core.tokens": ("TokenState", "unmerge"),
    "vitrim.errors": ("ReductionWarning", "UnsupportedModelError", "VitrimError"),
    "vitrim.engines.exported": ("Exported",),
    "vitrim.engines.writing": ("FileSpec",),
    "vitrim.measure.export": ("export",),
    "vitrim.measure.freeze": ("freeze",),
    "vitrim.hosts.torch.own": ("OwnBlock", "OwnHost"),
    "vitrim.loading": ("ModelSpec", "PlacedModel", "ScoredModel", "create_model"),
    "vitrim.measure.evaluation": ("evaluate",),
    "vitrim.measure.inputs": ("DataSpec", "JudgedData", "PageData", "ScoredData", "open_data"),
    "vitrim.measure.latency": ("Budget",),
    "vitrim.engines.prefill": ("Prompt",),
    "vitrim.measure.profile": ("profile",),
    "vitrim.plots.show": ("show",),
    "vitrim.report": ("Report",),
    "vitrim.results": ("FileResults", "Pictures", "Results", "ScoredResults"),
    "vitrim.measure.bench": ("bench",),
    "vitrim.measure.compare": ("compare",),
    "vitrim.training.running": ("Running",),
    "vitrim.training.train": ("train",),
    "vitrim.tuning.optimize": ("optimize",),
    "vitrim.tuning.search": ("SearchSpec",),
    "vitrim.tuning.tune": ("train_grid", "tune", "tune_grid"),
}
"""The public names, by the module that defines them."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name[:1].isupper():  # `from vitrim import style` asks here first, and shall not import every method
        from vitrim.core.registry import methods, selectors

        for config in (*methods().values(), *selectors().values()):
            if config.__name__ == name:
                return config
    raise AttributeError(f"module 'vitrim' has no attribute '{name}'")


def __dir__() -> list[str]:
    from vitrim.core.registry import methods, selectors

    own = (config.__name__ for config in (*methods().values(), *selectors().values()))
    return sorted(["__version__", *__all__, *own])
