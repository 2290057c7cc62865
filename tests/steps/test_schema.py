"""The JSON Schema that `capsule schema` prints."""

from __future__ import annotations

import json

from capsule.core.protocol import Protocol
from capsule.steps.described import KEYS
from capsule.steps.schema import SCHEMAS
from tests.conftest import Capsule


def test_every_key_of_a_protocol_is_described(capsule: Capsule) -> None:
    """A protocol's author finds a sentence beside every key, and none of a key that is no more."""
    made = json.loads(capsule("schema", "protocol").out)
    parts = {"Protocol": made, **{name: part for name, part in made["$defs"].items() if "properties" in part}}
    assert {name: set(part["properties"]) for name, part in parts.items() if name in KEYS} == {
        name: set(keys) for name, keys in KEYS.items()
    }
    assert set(parts) - set(KEYS) == {"DecimalScalar"}
    for name, keys in KEYS.items():
        assert {key: part["description"] for key, part in parts[name]["properties"].items()} == keys
    assert made["title"] == Protocol.__name__


def test_every_schema_is_printed(capsule: Capsule) -> None:
    """Each format that the help names has one; another name is a usage error that lists them."""
    for name in SCHEMAS:
        assert json.loads(capsule("schema", name).out)["type"] == "object"
    said = capsule("schema", "nothing")
    assert (said.code, "protocol" in said.err) == (2, True)
