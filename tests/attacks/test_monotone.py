"""For an expected identity, nothing that is left out, repeated or changed improves what verifying says.

Every change is sealed again, so that all digests of the container are right; events are chained again and their head
follows. CAPSULE_CHANGES is how many changes are tried of each capsule (`make fuzz`: many).
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from container_forge import forge

from capsule.core.canonical import canonical
from capsule.core.manifest import Manifest
from capsule.core.table import table_columns
from capsule.core.verdict import Verdict
from capsule.steps.verify import verify
from tests.attacks.vectors import MANIFEST, ROWS, Members, events, golden, with_events, with_file
from tests.fuzz.mutators import changed, mutate_bytes
from tests.golden.make import seal
from tests.tables import read_rows, table_bytes

BASES = ["supported", "refuted", "budget-ended", "results-edited", "row-removed", "charge-lowered", "results-missing"]
CHANGES = int(os.environ.get("CAPSULE_CHANGES", "10"))
RANK = {"broken": 0, "incomplete": 1, "intact": 2}
Change = Callable[[random.Random, Members], tuple[str, bytes]]


def member(chance: random.Random, members: Members) -> tuple[str, bytes]:
    """Leave out, repeat or change one member."""
    name = chance.choice(sorted(members))
    match chance.randrange(4):
        case 0:
            return f"without {name}", seal({key: data for key, data in members.items() if key != name})
        case 1:
            twice = sorted([*members.items(), (name, members[name])])
            return f"{name} twice", forge(twice)
        case 2:
            other = chance.choice(sorted(members))
            return f"{other} as {name}", seal({**members, name: members[other]})
        case _:
            return f"{name} changed", seal({**members, name: mutate_bytes(chance, members[name])})


def event(chance: random.Random, members: Members) -> tuple[str, bytes]:
    """Leave out, repeat, move or change one event, and chain all of them again."""
    items = events(members)
    at = chance.randrange(len(items))
    match chance.randrange(4):
        case 0:
            found, words = [*items[:at], *items[at + 1 :]], "without"
        case 1:
            found, words = [*items[: at + 1], *items[at:]], "twice"
        case 2:
            other = chance.randrange(len(items))
            items[at], items[other] = items[other], items[at]
            found, words = items, f"exchanged with {other}"
        case _:
            found, words = (
                [*items[:at], {**items[at], "data": changed(chance, items[at]["data"])}, *items[at + 1 :]],
                "changed",
            )
    try:
        return f"event {at} {words}", seal(with_events(found, members))
    except ValueError:  # a number that canonical JSON does not have
        return event(chance, members)


def row(chance: random.Random, members: Members) -> tuple[str, bytes]:
    """Leave out, repeat, move or change one row of the packed table."""
    columns = table_columns(Manifest.from_bytes(members[MANIFEST], "x").protocol.observations)
    rows = read_rows(members[ROWS], columns, 1000, ROWS)
    at = chance.randrange(len(rows))
    match chance.randrange(3):
        case 0:
            found: list[dict[str, Any]] = [*rows[:at], *rows[at + 1 :]]
        case 1:
            found = [*rows[: at + 1], *rows[at:]]
        case _:
            name, kind = chance.choice(columns)
            values: dict[str, list[Any]] = {
                "text": ["", "x", None],
                "bool": [True, False],
                "int64": [0, 7],
                "uint64": [0, 7],
            }
            found = [
                *rows[:at],
                {**rows[at], name: chance.choice(values.get(kind, [0.5, "NaN", None]))},
                *rows[at + 1 :],
            ]
    return f"row {at}", seal({**members, ROWS: table_bytes(columns, found)})


def journal(chance: random.Random, members: Members) -> tuple[str, bytes]:
    """Leave out, repeat or change one line of what was observed, and let the ledger name the new file."""
    name = chance.choice([name for name in sorted(members) if name.endswith("/journal.jsonl")])
    lines = members[name].splitlines(keepends=True)
    at = chance.randrange(len(lines))
    match chance.randrange(3):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case _:
            lines[at] = canonical(changed(chance, json.loads(lines[at]))) + b"\n"
    return f"{name}:{at}", seal(with_file(name, b"".join(lines), members))


def cases(name: str) -> list[tuple[str, bytes]]:
    chance = random.Random(name)
    members = golden(name)
    found = []
    for _ in range(CHANGES):
        kinds: list[Change] = [member, event, *([row] if ROWS in members else []), journal]
        try:
            found.append(chance.choice(kinds)(chance, members))
        except ValueError:  # a number that canonical JSON does not have
            continue
    return found


@pytest.mark.parametrize("name", BASES)
def test_no_change_improves_an_answer_for_an_expected_capsule(name: str) -> None:
    """Whatever was changed, it is not the capsule that was expected."""
    whole = seal(golden(name))
    before = verify(io.BytesIO(whole))
    assert before.capsule is not None
    for words, data in cases(name):
        after = verify(io.BytesIO(data), against=[before.capsule])
        same = after.capsule == before.capsule
        assert same or (after.integrity, after.outcome) == ("broken", "withheld"), words
        assert not same or (after.integrity, after.outcome) == (before.integrity, before.outcome), words


@pytest.mark.parametrize("name", BASES)
def test_no_change_improves_an_answer_for_an_expected_manifest(name: str) -> None:
    """No outcome becomes another and nothing intact; of these, a faulty part that is left out is merely absent."""
    before = verify(io.BytesIO(seal(golden(name))))
    assert before.manifest is not None
    for words, data in cases(name):
        after = verify(io.BytesIO(data), against=[before.manifest])
        assert after.outcome in (before.outcome, "withheld"), words
        assert not better(after, before) or (after.integrity == "incomplete" and words.startswith("without ")), words


def better(after: Verdict, before: Verdict) -> bool:
    return RANK[after.integrity] > RANK[before.integrity]


def test_the_changes_are_of_every_kind_and_most_are_found() -> None:
    found = [(words, verify(io.BytesIO(data)).integrity) for words, data in cases("supported")]
    assert sum(integrity != "intact" for _, integrity in found) > len(found) / 2
    assert {words.split()[0].partition("/")[0] for words, _ in found} >= {"event", "row", "3-attempts"}
    assert len({data for _, data in cases("supported")}) > len(found) / 2
