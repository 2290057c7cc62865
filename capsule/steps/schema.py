"""Schema: the JSON Schema of a format, made from the models that read it."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from capsule.core.attempt import EventLine
from capsule.core.errors import UsageError
from capsule.core.manifest import Manifest, SourceEntry
from capsule.core.plan import Cell
from capsule.core.protocol import Protocol
from capsule.core.results import Results
from capsule.core.schema import Model
from capsule.core.verdict import Verdict
from capsule.steps.described import KEYS

SCHEMAS: dict[str, type[Model] | type[Cell]] = {
    "protocol": Protocol,
    "manifest": Manifest,
    "cell": Cell,
    "source": SourceEntry,
    "event": EventLine,
    "results": Results,
    "verdict": Verdict,
}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a format.

    Raises:
        UsageError: there is no such format.
    """
    if name not in SCHEMAS:
        raise UsageError(f"expected one of {', '.join(SCHEMAS)}, found {name!r}")
    made = TypeAdapter(SCHEMAS[name]).json_schema(by_alias=True)
    for model, part in ((made["title"], made), *made.get("$defs", {}).items()):
        for key, words in KEYS.get(model, {}).items():
            part["properties"][key]["description"] = words
    return made
