"""The form that all models share, and the scalars that protocols are made of."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from capsule.core.attempt import DATA, EventLine
from capsule.core.canonical import canonical
from capsule.core.chain import Head
from capsule.core.digest import Digest, digest_of, hex_of, is_digest
from capsule.core.errors import MalformedError
from capsule.core.manifest import FileDigest, Manifest, SourceEntry
from capsule.core.plan import Cell
from capsule.core.protocol import Observation
from capsule.core.results import Results
from capsule.core.schema import (
    DecimalScalar,
    DecimalText,
    Identifier,
    Name,
    NonNegativeDecimal,
    PositiveDecimal,
    key_path,
    plain,
)
from capsule.core.verdict import Verdict

MODELS = [*DATA.values(), EventLine, Head, Manifest, SourceEntry, Cell, Results, Verdict]


def types_in(schema: Any) -> set[str]:
    """Return every JSON type that a schema mentions."""
    if isinstance(schema, dict):
        own = {schema["type"]} if isinstance(schema.get("type"), str) else set()
        return own.union(*(types_in(value) for value in schema.values()))
    if isinstance(schema, list):
        return set().union(*(types_in(value) for value in schema))
    return set()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_model_holds_a_float(model: type[Any]) -> None:
    """M-02: no float can enter an identity: none of the formats has a place for one."""
    found = types_in(TypeAdapter(model).json_schema())
    assert found
    assert "number" not in found


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6) | st.floats(allow_nan=False, allow_infinity=False))
def test_a_decimal_is_kept_as_its_author_wrote_it(value: Decimal | float) -> None:
    """P-02: a decimal stays the text that was written, and means exactly that number."""
    adapter = TypeAdapter(DecimalText)
    text = str(value)
    assert adapter.validate_python(text) == text
    assert Decimal(adapter.validate_python(text)) == Decimal(text)


@pytest.mark.parametrize(
    "value",
    ["NaN", "inf", "-Infinity", "", "1.", ".5", "01", "1e", "1e1000", "0x10", " 1", "1 ", "1,5", "1\n", "١", "1" * 65,
     True, None, [1], 1.5],
)  # fmt: skip
def test_what_is_no_finite_decimal_is_refused(value: Any) -> None:
    """P-02: NaN, infinities, other notations, booleans and floats are no decimals."""
    with pytest.raises(ValidationError, match="expected a"):
        TypeAdapter(DecimalText).validate_python(value)


def test_decimals_have_signs_that_fields_may_forbid() -> None:
    """P-02: a field that must be positive refuses zero, and one that must not be negative refuses less."""
    assert TypeAdapter(DecimalText).validate_python("-1_000.5e-3") == "-1000.5e-3"
    assert TypeAdapter(PositiveDecimal).validate_python("1e-999") == "1e-999"
    assert TypeAdapter(NonNegativeDecimal).validate_python(0) == "0"
    for adapter, text in ((TypeAdapter(PositiveDecimal), "0.0"), (TypeAdapter(NonNegativeDecimal), "-1e-9")):
        with pytest.raises(ValidationError, match="expected"):
            adapter.validate_python(text)


def test_parameters_reach_a_trial_as_numbers_that_a_double_holds() -> None:
    """P-02: a parameter with a fraction reaches the trial as a float, which must not become infinite on the way."""
    assert plain(DecimalScalar(decimal="1.50")) == 1.5
    assert plain((1, DecimalScalar(decimal="2e-3"), "x", True)) == [1, 0.002, "x", True]
    with pytest.raises(ValidationError, match="a double can hold"):
        DecimalScalar(decimal="1e400")


@pytest.mark.parametrize("text", ["a", "0-a.b_c", "a" * 63])
def test_names(text: str) -> None:
    """P-03: a name is lower case, safe in a path and a shell, and at most 63 long."""
    assert TypeAdapter(Name).validate_python(text) == text


@pytest.mark.parametrize("text", ["", "A", "-a", ".a", "a/b", "a b", "a" * 64, "a\n", "ä", "a[b]", "a=b"])
def test_other_names_are_refused(text: str) -> None:
    """P-03: no name holds a slash, a bracket, a space, a newline or a capital, or begins with a dot or dash."""
    with pytest.raises(ValidationError):
        TypeAdapter(Name).validate_python(text)
    with pytest.raises(ValidationError):
        TypeAdapter(Identifier).validate_python(text.replace("a", "-"))


def test_a_model_is_read_from_its_own_bytes_only() -> None:
    """M-01: unknown keys, absent keys, other types and defaults left away are refused, never repaired."""
    entry = FileDigest(size=3, sha256=digest_of(b"abc"))
    assert FileDigest.from_bytes(entry.to_bytes(), "x") == entry
    good = entry.to_json()
    other_sizes = [{**good, "size": size} for size in ("3", True, -1, None)]
    for bad in ({**good, "more": 1}, {"size": 3}, {**good, "sha256": good["sha256"].upper()}, [good], *other_sizes):
        with pytest.raises(MalformedError, match=r"^x: "):
            FileDigest.from_bytes(canonical(bad), "x")


def test_a_default_is_written_out() -> None:
    """M-01: a key that has a default is there all the same, so that a value has one byte string."""
    files = {"name": "x", "type": "text", "replay": {"rule": "exact"}}
    with pytest.raises(MalformedError, match="defaults left away"):
        Observation.from_bytes(canonical(files), "x")
    whole = Observation.model_validate_json(canonical(files))
    assert Observation.from_bytes(whole.to_bytes(), "x") == whole


def test_key_paths_read_like_the_file() -> None:
    """P-01: a place in the protocol is written as a person would."""
    assert key_path(("arms", 1, "trial")) == "arms[1].trial"
    assert key_path(()) == ""


ZEROS = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    "text", ["", "sha256:", ZEROS[:-1], ZEROS + "0", "sha256:" + "A" * 64, "md5:" + "0" * 64, ZEROS + "\n", " " + ZEROS]
)
def test_a_digest_has_one_form(text: str) -> None:
    """M-02: a digest is `sha256:` and 64 lower-case hexadecimal digits, and nothing else is."""
    assert not is_digest(text)
    with pytest.raises(ValidationError):
        TypeAdapter(Digest).validate_python(text)
    assert is_digest(digest_of(b""))
    assert digest_of(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hex_of(digest_of(b"abc")).startswith("ba7816bf")
