"""The error tree and the table of exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from capsule.core import errors
from capsule.core.errors import CapsuleError

ROOT = Path(__file__).parents[2]


def tree(of: type[CapsuleError] = CapsuleError) -> list[type[CapsuleError]]:
    """Return an error class and all below it."""
    return [of, *(found for below in of.__subclasses__() for found in tree(below))]


def own() -> list[type[CapsuleError]]:
    """Return the classes that the core defines."""
    return [found for found in tree() if found.__module__ == errors.__name__]


def test_every_error_has_a_code_of_the_table() -> None:
    """Exit codes are those of the decision record, each used, and 0 by no error."""
    text = (ROOT / "docs" / "adr" / "0008-exit-codes-and-errors.md").read_text(encoding="utf-8")
    table = {int(code) for code in re.findall(r"^\| ([0-9]) \|", text, re.MULTILINE)}
    assert {found.exit_code for found in own()} | {0} == table


def test_every_error_has_a_word_of_its_own() -> None:
    """Programs tell errors apart by a stable word, and every class ends in Error."""
    words = [found.code for found in own()]
    assert len(words) == len(set(words))
    assert all(found.__name__.endswith("Error") for found in own())
    assert {name for name in vars(errors) if name.endswith("Error")} == {found.__name__ for found in own()}


def test_a_refusal_of_any_kind_has_the_code_of_a_refusal() -> None:
    """A class below another keeps its exit code, so that scripts can rely on the kind."""
    for found in own():
        for below in found.__subclasses__():
            assert below.exit_code == found.exit_code or found is CapsuleError


def test_an_error_carries_message_and_hint() -> None:
    """An error is words for a person and at most one hint."""
    error = errors.DriftError("expected this, found that", hint="undo it")
    assert (str(error), error.message, error.hint) == (
        "expected this, found that",
        "expected this, found that",
        "undo it",
    )
    assert errors.MachineError("x").hint is None


@given(st.text(max_size=300), st.integers(100, 400))
def test_words_have_a_bound(words: str, most: int) -> None:
    """What is short stays as it is; of the rest beginning, end and the number of characters between are left."""
    short = errors.shortened(words * 3, most)
    assert len(short) <= most
    if len(words * 3) <= most:
        assert short == words * 3
        return
    begin, cut, end = re.fullmatch(r"(.*) \[\.\.\. (\d+) characters cut \.\.\.\] (.*)", short, re.DOTALL).groups()  # type: ignore[union-attr]
    assert (words * 3).startswith(begin)
    assert (words * 3).endswith(end)
    assert len(begin) + int(cut) + len(end) == len(words * 3)


def test_an_error_is_of_bounded_length() -> None:
    error = errors.MalformedError(f"expected a path, found {'x' * 20_000_000!r}, and so on")
    assert len(error.message) == len(str(error)) <= errors.WORDS_MAX
    assert error.message.startswith("expected a path, found 'xxx")
    assert error.message.endswith("xxx', and so on")
    assert errors.shortened(error.message) == error.message
