"""Opens and runs exported files under an audit hook of the interpreter, and prints what Python was asked for.

A process of its own: such a hook cannot be taken off again, and before Python 3.12 threads of the process may fail
while it runs. Arguments: pairs of a format and a path; one line of JSON for each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from vitrim.engines import Exported
from vitrim.engines.formats import formats
from vitrim.errors import VitrimError

IMAGES = np.ones((2, 3, 4, 4), np.float32)
WATCHED = {
    *("import", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"),
    *("pickle.find_class", "ctypes.dlopen"),
}

asked: list[str] = []
watching = False


def hear(event: str, given: tuple[Any, ...]) -> None:
    if watching and event in WATCHED:
        asked.append(f"{event} {given[:1]}")


def opened_and_run(path: str) -> dict[str, Any]:
    file = Exported.open(path)
    try:
        found: Any = file.run(IMAGES).tolist()
    except VitrimError as error:
        found = str(error)
    return {"metadata": dict(file.metadata), "found": found}


if __name__ == "__main__":
    sys.addaudithook(hear)
    for name, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if not formats()[name].code:
            opened_and_run(path)  # once before: what an engine itself imports is imported then
        Exported.open(path)
        asked.clear()
        watching = True
        result = opened_and_run(path)
        watching = False
        print(json.dumps({**result, "asked": asked}), flush=True)
