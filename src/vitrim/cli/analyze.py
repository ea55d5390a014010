"""``vitrim analyze``: what reductions do to tokens and features, as a report, from images or from stored records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli import common
from vitrim.cli.analyzing import Pass, Report
from vitrim.cli.measuring import DTYPES, Dtype, data_facts, run_batches, task_and_data
from vitrim.cli.setup import Data, DataOptions, Limit, Machine, Model, Reading, Record, Setup, Weights
from vitrim.errors import MissingPackageError, VitrimError

if TYPE_CHECKING:
    from vitrim.analysis.record import Record as Recorded
    from vitrim.core.method import MethodConfig

Out = Annotated[Path, typer.Option("--out", help="folder for the report, its tables, figures and records")]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        help="families with commas: patterns, depth, counts, features, loss, and those that run the model once more, "
        "sensitivity, attention, router, tsne, throughput (so does loss, if named); all; default: those of one pass",
    ),
]
Sizes = Annotated[
    str | None, typer.Option("--sizes", help="throughput: pixels a side, with commas; default: the model's own")
]
Formats = Annotated[str, typer.Option("--format", help="of the files in figures/: png, svg, or both with a comma")]
Compare = Annotated[
    bool,
    typer.Option("--compare", help="compare finished analyses, whose folders stand in place of MODEL"),
]


@dataclass(frozen=True, kw_only=True)
class Source(Weights):
    """The models to analyse, or the folders of finished analyses."""

    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="model, as for `vitrim eval`; with --compare: two or more reports"),
    ] = None
    more: Annotated[
        list[str] | None,
        typer.Option("--model", help="a further model, run with the same methods on the same images; may repeat"),
    ] = None

    def models(self) -> list[Model]:
        """The models.

        Raises:
            VitrimError: none is named, several are in the place of one, one is named twice, or several share a
                checkpoint.
        """
        if not self.names:
            raise VitrimError("give a model and --data, or stored records with --from")
        if len(self.names) > 1:
            raise VitrimError(f"give one model, not {', '.join(self.names)}: further ones go behind --model")
        names = [*self.names, *(self.more or ())]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise VitrimError(f"model {twice} is given twice")
        if len(names) > 1 and self.checkpoint is not None:
            raise VitrimError("--checkpoint is of one model: with --model, name runs as run:FOLDER")
        given = {field: getattr(self, field) for field in ("pretrained", "checkpoint", "model_option")}
        return [Model(name=name, **given) for name in names]


@dataclass(frozen=True, kw_only=True)
class Pictures(Reading):
    """The images to analyse it on, if there are any."""

    source: Annotated[
        str | None, typer.Option("--data", help="images with labels, as for `vitrim eval`; not with --from")
    ] = None
    limit: Limit = None
    data_option: DataOptions = None

    def data(self) -> Data:
        """The images.

        Raises:
            VitrimError: no source is given.
        """
        if self.source is None:
            raise VitrimError("give the images to analyse the model on with --data")
        given = {field: getattr(self, field) for field in ("split", "image_column", "label_column", "data_option")}
        return Data(source=self.source, limit=self.limit, **given)


@dataclass(frozen=True, kw_only=True)
class Stored(Setup):
    """Records of earlier runs."""

    stored: Annotated[
        list[Path] | None,
        typer.Option("--from", help="analyse this stored record instead, without model and data; may repeat"),
    ] = None

    def load(self) -> list[Recorded]:
        """Read the records."""
        from vitrim.analysis.record import Record as Recorded

        return [Recorded.load(file) for file in self.stored or ()]


def analyze(
    *,
    source: Source,
    pictures: Pictures,
    methods: common.MethodsBesideDense = None,
    stored: Stored,
    compare: Compare = False,
    out: Out,
    only: Only = None,
    sizes: Sizes = None,
    formats: Formats = "png",
    batch_size: common.BatchSize = 32,
    dtype: Dtype = "fp32",
    workers: common.Workers = 0,
    machine: Machine,
    record: Record,
) -> None:
    """Analyse which patches reductions keep and merge, how deep they go, and what that does to features.

    All methods see the same batches, in one pass over the data. The report is index.html in --out. It can be made again
    from the records, with --from, without model or data. If the pass stops half-way, what was gathered is analysed.
    """
    configs = common.parse_methods(methods or ())
    common.check_choice("dtype", dtype, DTYPES)
    from vitrim.analysis.families import FAMILIES, check_stored, chosen
    from vitrim.analysis.output import check_output, read_report
    from vitrim.analysis.report import check_formats

    families = chosen(only.split(",")) if only is not None else []
    if sizes is not None and "throughput" not in families:
        raise VitrimError("--sizes is of the family throughput, which runs only if it is named: --only throughput")
    kinds = check_formats(formats)
    _check_packages()
    check_output(out)
    report = Report(out, families, kinds, record)
    if compare or stored.stored:
        _check_alone(source, pictures, configs, stored, compare)
        own = {"device": machine.device != "cpu", "dtype": dtype != "fp32", "workers": workers > 0}
        own |= {"threads": machine.threads is not None, "seed": machine.seed != 0}
        _check_unused({**own, "batch-size": batch_size != 32}, compare)
        check_stored(families)
        found = {"environment": machine.environment("float32")}
        if compare:
            report.compare([read_report(Path(folder)) for folder in source.names or ()], found)
        else:
            report.show(stored.load(), found)
        return
    models, data, pixels = source.models(), pictures.data(), _sizes(sizes)
    runs_model = [name for name in families if name not in FAMILIES]
    if len(models) > 1 and runs_model:
        raise VitrimError(f"{runs_model[0]} runs one model: leave out --model")
    passes = [_prepared(model, data, configs, machine, dtype, batch_size) for model in models]
    passes = [one._replace(subject=replace(one.subject, workers=workers, sizes=pixels)) for one in passes]
    if families and len(runs_model) == len(families):  # nothing to gather in a pass over all images
        report.show([], {**passes[0].found, "complete": True}, subject=passes[0].subject)
        return
    with report.kept(passes):
        for one in passes:
            run_batches(one.measurement, one.subject.dataset, data.limit, one.subject.batch_size, workers, None)


def _sizes(text: str | None) -> tuple[int, ...]:
    """The sizes in pixels of ``--sizes``.

    Example:
        >>> _sizes("224,384")
        (224, 384)
    """
    parts = [] if text is None else text.split(",")
    wrong = next((part for part in parts if not part.strip().isdecimal() or int(part) == 0), None)
    if wrong is not None:
        raise VitrimError(f"--sizes takes whole numbers of pixels with commas, e.g. 224,384; got '{wrong}'")
    return tuple(map(int, parts))


def _check_packages() -> None:
    """Refuse, before any work, to start without the packages of the metrics and the report."""
    for package in ("scipy", "sklearn", "ot", "matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise MissingPackageError(f"an analysis needs the package '{package}': pip install 'vitrim[analysis]'")


def _check_alone(
    source: Source, pictures: Pictures, configs: list[MethodConfig], stored: Stored, compare: bool
) -> None:
    """Refuse what has no place beside --from and --compare."""
    if compare and (stored.stored or source.more or pictures.source is not None or configs):
        raise VitrimError("--compare reads finished analyses: leave out --from, --model, --data and the methods")
    if not compare and (source.names or source.more or pictures.source is not None or configs):
        raise VitrimError("--from analyses stored records: leave out the model, --data and the methods")
    given = {field.name: getattr(group, field.name) for group in (source, pictures) for field in fields(group)}
    _check_unused({name: bool(value) for name, value in given.items() if name != "names"}, compare)


def _check_unused(given: Mapping[str, bool], compare: bool) -> None:
    """Refuse options that nothing reads beside --from and --compare, given as what is there by name."""
    without_effect = next((name for name, there in given.items() if there), None)
    if without_effect is not None:
        read = "--compare reads finished analyses" if compare else "--from analyses stored records"
        raise VitrimError(f"{read}, and runs no model: leave out --{without_effect.replace('_', '-')}")


def _prepared(
    model: Model, data: Data, configs: list[MethodConfig], machine: Machine, dtype: str, batch_size: int
) -> Pass:
    """The measurement that gathers the records, what else is run on its images, and what is known beforehand."""
    import torch

    from vitrim.analysis.collect import Collect
    from vitrim.analysis.subject import Subject
    from vitrim.measure.contestants import contestants
    from vitrim.measure.run import Measurement

    device = machine.select()
    dense = model.load()
    task, dataset = task_and_data(dense, model, data, None)
    batch_size = task.eval_batch(batch_size)
    precision = getattr(torch, DTYPES[dtype])
    models = contestants(dense, configs, task, device=device, dtype=precision, learned=model.learned)
    facts = data_facts(dataset, data, batch_size)
    found = {
        "environment": machine.environment(DTYPES[dtype]),
        "model": model.name,
        "weights": model.weights,
        "model_options": model.options,
        "task": task.name,
        "data": facts,
    }
    probe = Collect(num_images=facts["images"])
    own = dense.to(device=device, dtype=precision).eval()
    subject = Subject(
        own, configs, task, dataset, batch_size, limit=data.limit, seed=machine.seed, learned=model.learned
    )
    return Pass(Measurement(models, [probe], task, seed=machine.seed), subject, found)
