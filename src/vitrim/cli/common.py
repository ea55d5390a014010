"""Names that commands of before import."""

from __future__ import annotations

from pathlib import Path

from vitrim.cli.options import MAX_BATCH as MAX_BATCH
from vitrim.cli.options import MAX_REPEATS as MAX_REPEATS
from vitrim.cli.options import MAX_SECONDS as MAX_SECONDS
from vitrim.cli.options import MAX_SEED as MAX_SEED
from vitrim.cli.options import MAX_THREADS as MAX_THREADS
from vitrim.cli.options import MAX_WORKERS as MAX_WORKERS
from vitrim.cli.options import BatchSize as BatchSize
from vitrim.cli.options import Methods as Methods
from vitrim.cli.options import MethodsBesideDense as MethodsBesideDense
from vitrim.cli.options import Workers as Workers
from vitrim.cli.options import check_choice as check_choice
from vitrim.cli.options import parse_methods as parse_methods
from vitrim.cli.options import parse_options as parse_options
from vitrim.cli.output import console as console
from vitrim.cli.output import is_first_process as is_first_process
from vitrim.cli.output import print_table as print_table
from vitrim.cli.output import write_json as write_json
from vitrim.files import check_file

INTERRUPTED = 130
TERMINATED = 143


def check_json(target: str | None) -> None:
    """Refuse, before any work, a target that `write_json` could not write to.

    Raises:
        VitrimError: there is no such place, or no permission.
    """
    if target not in (None, "-"):
        check_file(Path(target))
