"""What runs inside a trial's process: `record`, and the loop that calls a Python trial once per planned cell.

One file, standard library only, quick to import: it may run under another interpreter than the tool's own and must add
nothing to what a trial measures. Run as a script it reads a task (see `run_task`); imported, it gives `record`, the
one name that a user's own script needs:

    from capsule import record
    record(loss=0.25, steps=1000)

Durability: `record` hands the line to the kernel with one write and does not sync. A trial or supervisor that is killed
loses no line that `record` returned from. A machine that loses power can lose the lines since the supervisor's last
sync: it syncs the journal every five seconds, and once more when the trial has ended.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTEGER_LIMIT = 2**53
LINE_BYTES_MAX = 1 << 20
TEXT_MAX = 10_000
ERROR_TEXT_MAX = 2_000
QUIET_NAN = "7ff8000000000000"

_state = {"noted": False}


@dataclass(frozen=True)
class Cell:
    """One planned observation, as a trial function receives it.

    `parameters` are the arm's and `workload` the workload's, numbers with a fraction as floats; `device` is `cpu` or
    `cuda`; `source_root` is the folder of the arm's frozen sources.
    """

    id: str
    arm: str
    parameters: Mapping[str, Any]
    workload: Mapping[str, Any]
    seed: int
    start: int
    block: int
    position: int
    device: str
    source_root: Path
    attempt: str


def record(cell: str | None = None, **observations: Any) -> None:
    """Record the observations of one planned cell as one line of the journal.

    `cell` may be left out where the process runs one cell. Values are booleans, integers, floats (every bit is kept),
    text, None for an optional observation, or anything of one element with `.item()` (NumPy, torch). `error="words"`
    in place of observations says that the cell failed. Outside a run the row goes to stderr instead.

    Raises:
        TypeError: a value is of no type that a record can hold.
        ValueError: a text or the whole line is too long, or a name is reserved.
        OSError: the journal could not be written; the row is not recorded.
    """
    if "end" in observations:
        raise ValueError("`end` is the name of the end record; name the observation otherwise")
    row = {name: encode(name, value) for name, value in observations.items()}
    named = cell if cell is not None else os.environ.get("CAPSULE_CELL")
    if named is not None:
        row["cell"] = named
    path = os.environ.get("CAPSULE_RECORDS")
    if path:
        _append(path, row)
        return
    if not _state["noted"]:
        _state["noted"] = True
        print("capsule: note: not inside `capsule run`, so records are shown here and kept nowhere", file=sys.stderr)
    print(_line(row).decode(), end="", file=sys.stderr, flush=True)


def encode(name: str, value: Any) -> bool | int | float | str | None:
    """Return the form in which a value is written, so that its type's every value survives JSON."""
    if not isinstance(value, bool | int | float | str | None) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: expected one number, found a {type(value).__name__}: {error}") from error
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < INTEGER_LIMIT else str(int(value))
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        if len(value) > TEXT_MAX:
            raise ValueError(f"{name}: expected text of at most {TEXT_MAX} characters, found {len(value)}")
        return str(value)
    raise TypeError(f"{name}: expected a boolean, number, text or None, found a {type(value).__name__}")


def _float(value: float) -> float | str:
    if math.isnan(value):
        bits = struct.pack(">d", value).hex()
        return "NaN" if bits == QUIET_NAN else f"NaN:{bits}"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return float(value)


def _line(item: Mapping[str, Any]) -> bytes:
    text = json.dumps(item, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        line = text.encode() + b"\n"
    except UnicodeEncodeError as error:
        raise ValueError("expected Unicode text, found a lone surrogate") from error
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"expected a row of at most {LINE_BYTES_MAX} bytes, found {len(line)}")
    return line


def _append(path: str, item: Mapping[str, Any]) -> None:
    """Append one line with one write; the descriptor is not kept, so that a trial may close or fork as it likes."""
    line = _line(item)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written != len(line):
        raise OSError(f"{path}: expected to write {len(line)} bytes, wrote {written}: the row is torn")


def run_task(task: Mapping[str, Any]) -> None:
    """Run the cells of a Python trial in order and write their rows, the imports and then the end record.

    The task holds `attempt`, `device`, the paths `records` and `imports`, and `cells`: each with `cell`, `arm`, `trial`
    (`module:function`), `parameters`, `workload`, `seed`, `start`, `block`, `position` and `source_root`. An exception
    of a trial is the row of its cell; the next cell still runs. What ends the process (`SystemExit`, a signal) ends
    the attempt: no end record, and the rows so far are kept.
    """
    functions: dict[tuple[str, str], Callable[[Cell], Any] | Exception] = {}
    for item in task["cells"]:
        key = (item["source_root"], item["trial"])
        if key not in functions:
            functions[key] = _import(*key)
        _append(task["records"], _row(functions[key], _cell(task, item)))
    with Path(task["imports"]).open("wb") as sink:
        for module in imported_modules():
            sink.write(_line(module))
    _append(task["records"], {"end": True})


def _import(source_root: str, trial: str) -> Callable[[Cell], Any] | Exception:
    """Return the trial's function, or the exception that took its place."""
    module, _, name = trial.partition(":")
    if source_root not in sys.path[:1]:
        sys.path.insert(0, source_root)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        traceback.print_exc()
        return error
    if not callable(function):
        return TypeError(f"{trial}: expected a function, found a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _cell(task: Mapping[str, Any], item: Mapping[str, Any]) -> Cell:
    return Cell(
        id=item["cell"],
        arm=item["arm"],
        parameters=item["parameters"],
        workload=item["workload"],
        seed=item["seed"],
        start=item["start"],
        block=item["block"],
        position=item["position"],
        device=task["device"],
        source_root=Path(item["source_root"]),
        attempt=task["attempt"],
    )


def _row(function: Callable[[Cell], Any] | Exception, cell: Cell) -> dict[str, Any]:
    """Return the row of a cell: what its trial returned, or its error."""
    if isinstance(function, Exception):
        return _error_row(cell, function)
    try:
        observed = function(cell)
        if not isinstance(observed, Mapping):
            raise TypeError(f"expected a mapping of observations, found a {type(observed).__name__}")
        for name in observed:
            if not isinstance(name, str) or name in ("cell", "error", "end"):
                raise TypeError(f"expected names of observations, found {name!r}")
        row: dict[str, Any] = {name: encode(name, value) for name, value in observed.items()}
        row["cell"] = cell.id
        _line(row)
    except Exception as error:
        traceback.print_exc()
        return _error_row(cell, error)
    return row


def _error_row(cell: Cell, error: Exception) -> dict[str, Any]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = str(error)[:ERROR_TEXT_MAX].encode(errors="backslashreplace").decode()
    return {"cell": cell.id, "error": {"type": name, "message": message}}


def imported_modules() -> Iterator[dict[str, str | None]]:
    """Yield name, file and digest of every imported module that has a file; the digest is null if it cannot be read.

    The file is the one that the module was loaded from. Libraries also make modules of their own, loaded from nothing,
    whose `__file__` is a bare name that leads nowhere: these have no file.
    """
    digests: dict[str, str | None] = {}
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        located = getattr(spec, "has_location", False)
        file = getattr(spec, "origin", None) if located else getattr(module, "__file__", None)
        if not isinstance(file, str) or not (Path(file).is_absolute() or Path(file).exists()):
            continue
        path = os.fsencode(Path(file).absolute()).decode(errors="backslashreplace")
        if path not in digests:
            digests[path] = _digest(path)
        yield {"module": name, "file": path, "sha256": digests[path]}


def _digest(path: str) -> str | None:
    try:
        with Path(path).open("rb") as source:
            return "sha256:" + hashlib.file_digest(source, "sha256").hexdigest()
    except OSError:
        return None


def main(arguments: list[str]) -> None:
    """Run the task of the file named on the command line."""
    if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    task = json.loads(Path(arguments[0]).read_bytes())
    os.environ["CAPSULE_RECORDS"] = task["records"]
    run_task(task)


if __name__ == "__main__":
    main(sys.argv[1:])
