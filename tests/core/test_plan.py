"""The plan: every cell that a protocol promises, in an order that can be drawn once only."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from builders import appended, edited, protocol
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.core import plan
from capsule.core.errors import ProtocolError
from capsule.core.manifest import cell_lines, list_digest
from capsule.core.plan import base, count_cells, crossed, enumerate_cells, selected, shuffle
from capsule.core.schema import DecimalScalar

DEPTH = '[[factors]]\nname = "depth"\nlevels = [1, 2.50]\n[[factors]]\nname = "kind"\nlevels = ["a", true]\n'


def drawn(items: list[Any], seed: int, label: str) -> list[Any]:
    """Shuffle by the words of the specification, written again: the numbers below n of a stream, then swaps."""
    numbers = []
    for counter in range(200):
        block = hashlib.sha256(b"capsule.shuffle/0\n%d\n%s\n%d" % (seed, label.encode(), counter)).hexdigest()
        numbers += [int(block[at : at + 16], 16) for at in (0, 16, 32, 48)]
    order = list(items)
    for left in reversed(range(2, len(items) + 1)):
        while numbers[0] >= 2**64 // left * left:
            del numbers[0]
        chosen = numbers.pop(0) % left
        order[left - 1], order[chosen] = order[chosen], order[left - 1]
    return order


GOLDEN = {
    (7, "arms/5/0/small/0", 2): "ab",
    (0, "", 8): "dfbeahgc",
    (20261130, "workloads/31/0", 8): "dfagcbeh",
    (2**53 - 1, "x", 26): "lsfyohjgdrbwtcunpekizxqamv",
}


@given(st.lists(st.integers(), max_size=40), st.integers(0, 2**53 - 1), st.text(max_size=10))
def test_a_shuffle_is_a_permutation_drawn_as_specified(items: list[int], seed: int, label: str) -> None:
    """P-07: nothing is lost or doubled, and an independent drawing by the specification gives the same order."""
    found = shuffle(items, seed, label)
    assert Counter(found) == Counter(items)
    assert found == drawn(items, seed, label)
    assert found == shuffle(items, seed, label)


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_golden_orders(key: tuple[int, str, int], expected: str) -> None:
    """P-07: orders that were drawn once stay what they were, for ever and on every machine."""
    seed, label, count = key
    letters = "abcdefghijklmnopqrstuvwxyz"[:count]
    assert "".join(shuffle(letters, seed, label)) == expected


def test_a_shuffle_is_fair() -> None:
    """P-07: over many seeds every order of three comes up about equally often."""
    found = Counter("".join(shuffle("abc", seed, "fair")) for seed in range(6000))
    assert len(found) == 6
    assert all(abs(count - 1000) < 150 for count in found.values())


@given(
    seeds=st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=3, unique=True),
    starts=st.integers(1, 3),
    blocks=st.integers(1, 3),
    order=st.sampled_from(["abba", "shuffled", "listed"]),
    isolation=st.sampled_from(["start", "workload", "cell"]),
    factors=st.booleans(),
)
@settings(max_examples=60)
def test_cells_are_counted_named_and_grouped(
    seeds: list[int], starts: int, blocks: int, order: str, isolation: str, factors: bool
) -> None:
    """P-06 P-08: each arm meets each workload in each block of each start; names and processes count from zero."""
    if len(seeds) * starts < 2:
        starts = 2
    text = edited(
        ("seeds = [5, 3, 4]", f"seeds = {seeds}\nstarts = {starts}\nblocks = {blocks}"),
        ('order = "abba"', f'order = "{order}"'),
        ('isolation = "start"', f'isolation = "{isolation}"'),
    )
    plan = protocol(appended(DEPTH, to=text) if factors else text)
    cells = enumerate_cells(plan)
    assert len(cells) == count_cells(plan)
    assert [cell.cell for cell in cells] == [f"c{number:06d}" for number in range(len(cells))]
    times = 2 if order == "abba" else 1
    met = Counter((cell.arm, cell.workload, cell.seed, cell.start, cell.block) for cell in cells)
    names = [workload.name for workload in crossed(plan)]
    assert met == {
        (arm, workload, seed, start, block): times
        for arm in ("loop", "builtin") for workload in names for seed in seeds for start in range(starts)
        for block in range(blocks)
    }  # fmt: skip
    assert [(cell.seed, cell.start) for cell in cells] == sorted(
        ((cell.seed, cell.start) for cell in cells), key=lambda pair: (seeds.index(pair[0]), pair[1])
    )
    shared = {"start": ("seed", "start"), "workload": ("seed", "start", "workload"), "cell": ("cell",)}[isolation]
    keys = [tuple(getattr(cell, name) for name in shared) for cell in cells]
    groups = [key for key, _ in groupby(keys)]
    assert [process for process, _ in groupby(cell.process for cell in cells)] == list(range(len(groups)))
    assert len(set(groups)) == len(groups)
    assert len({(key, cell.process) for key, cell in zip(keys, cells, strict=True)}) == len(groups)
    for _, group in groupby(cells, key=lambda cell: (cell.seed, cell.start, cell.workload, cell.block)):
        run = list(group)
        assert [cell.position for cell in run] == list(range(2 * times))
        arms = [cell.arm for cell in run]
        if order == "abba":
            assert arms == arms[::-1]
        if order == "listed":
            assert arms == ["loop", "builtin"]


def test_listed_order_is_the_files() -> None:
    """P-08: with order = "listed" nothing is drawn: arms and workloads run as the file lists them."""
    cells = enumerate_cells(protocol(edited(('"abba"', '"listed"'))))
    assert [(cell.workload, cell.arm) for cell in cells[:4]] == [
        ("small", "loop"), ("small", "builtin"), ("large", "loop"), ("large", "builtin"),
    ]  # fmt: skip
    assert [cell.seed for cell in cells[::4]] == [5, 3, 4]


def test_the_order_is_drawn_with_the_specified_labels() -> None:
    """P-08: workloads are drawn per start and arms per block, each with a label of its own."""
    cells = enumerate_cells(protocol(edited(('"abba"', '"abba"\nblocks = 3'))))
    expected = []
    for seed in (5, 3, 4):
        for workload in drawn(["small", "large"], 7, f"workloads/{seed}/0"):
            for block in range(3):
                arms = drawn(["loop", "builtin"], 7, f"arms/{seed}/0/{workload}/{block}")
                expected += [(seed, workload, block, arm) for arm in arms + arms[::-1]]
    assert [(cell.seed, cell.workload, cell.block, cell.arm) for cell in cells] == expected


def test_factors_cross_every_workload() -> None:
    """P-05: a workload is crossed with every level of every factor, named in their order, parameters merged."""
    found = crossed(protocol(appended(DEPTH)))
    assert [workload.name for workload in found[:4]] == [
        "small[depth=1,kind=a]", "small[depth=1,kind=True]", "small[depth=2.50,kind=a]", "small[depth=2.50,kind=True]",
    ]  # fmt: skip
    assert found[2].parameters == {"numbers": 20, "depth": DecimalScalar(decimal="2.50"), "kind": "a"}
    assert len(found) == 8
    assert {base(workload.name) for workload in found} == {"small", "large"}
    assert base("small[kind=a[b],c]") == "small"


@pytest.mark.parametrize(
    ("table", "excluded"),
    [
        ('arm = "loop"\nworkload = "small[depth=1,kind=a]"', 6),
        ('arm = "loop"\nworkload = "small"', 24),
        ('workload = "small[depth=1,kind=a]"', 12),
        ('arm = "loop"', 48),
    ],
)
def test_exclusions_name_arms_and_workloads_crossed_or_whole(table: str, excluded: int) -> None:
    """P-06: an excluded cell stays in the plan with its reason; a workload is named whole or crossed."""
    both = "".join(f'[[exclusions]]\n{table}\nreason = "{reason}"\n' for reason in ("first", "second"))
    text = appended(DEPTH + both, to=edited(('gates = ["summed"]', 'gates = ["summed"]\nworkloads = ["large"]')))
    cells = enumerate_cells(protocol(only_gates(text)))
    assert Counter(cell.excluded for cell in cells) == {"first": excluded, None: 96 - excluded}
    assert {cell.arm for cell in cells if cell.excluded} >= {"loop"}


def test_of_several_exclusions_the_first_counts() -> None:
    """P-06: whichever of two exclusions is the narrower, the reason is that of the one that the file lists first."""
    broad, narrow = (
        'workload = "small"\nreason = "broad"\n',
        'workload = "small[depth=1]"\narm = "loop"\nreason = "narrow"\n',
    )
    depth = '[[factors]]\nname = "depth"\nlevels = [1, 2]\n'
    only_large = edited(("threshold = 0", 'threshold = 0\nworkloads = ["large"]'),
                        ('gates = ["summed"]', 'gates = ["summed"]\nworkloads = ["large"]'))  # fmt: skip
    for tables, expected in (((broad, narrow), {"broad"}), ((narrow, broad), {"narrow", "broad"})):
        text = depth + "".join(f"[[exclusions]]\n{table}" for table in tables)
        cells = enumerate_cells(protocol(appended(text, to=only_large)))
        assert {cell.excluded for cell in cells if cell.workload.startswith("small")} == expected


def test_words_that_would_favour_some_places_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """P-07: of 2^64 words one is left over by 3, and the shuffle does not use it."""
    monkeypatch.setattr(plan, "_words", lambda seed, label: iter([2**64 - 1, 1, 1]))
    assert shuffle("abc", 0, "") == ["a", "c", "b"]
    monkeypatch.setattr(plan, "_words", lambda seed, label: iter([2**64 - 2, 0]))
    assert shuffle("abc", 0, "") == ["b", "a", "c"]


def only_gates(text: str) -> str:
    """Return a protocol without its interval hypothesis."""
    begin, end = text.index('[[hypotheses]]\nname = "faster"'), text.index('[[hypotheses]]\nname = "right"')
    return text[:begin] + text[end:]


def test_hypotheses_select_workloads_crossed_or_whole() -> None:
    """P-14: a hypothesis is about all planned workloads, or about those that it names, each once."""
    text = appended(DEPTH)
    names = [workload.name for workload in crossed(protocol(text))]

    def chosen(workloads: str) -> list[str]:
        plan = protocol(edited(("threshold = 0", f"threshold = 0\nworkloads = {workloads}"), text=text))
        return selected(plan, plan.hypotheses[0])

    assert chosen("[]") == names
    assert chosen('["large"]') == names[4:]
    assert chosen('["small[depth=1,kind=a]", "large", "large"]') == [names[0], *names[4:]]


def test_a_plan_too_large_or_empty_is_refused_without_enumerating_it() -> None:
    """P-06: an endless plan is refused at once, and one of which nothing runs as well."""
    plan = protocol()
    many = plan.model_copy(update={"design": plan.design.model_copy(update={"starts": 1_000_000, "blocks": 1_000_000})})
    with pytest.raises(ProtocolError, match="expected at most 200000 planned cells, found 24000000000000"):
        enumerate_cells(many)
    text = '[[exclusions]]\narm = "loop"\nreason = "x"\n[[exclusions]]\narm = "builtin"\nreason = "y"\n'
    with pytest.raises(ProtocolError, match="found all 24 planned cells excluded"):
        protocol(appended(text))


def test_a_plan_takes_a_few_bytes_for_each_cell() -> None:
    """P-06: what a small protocol plans is not kept cell by cell, also where cells are excluded."""
    exclusion = '[[exclusions]]\narm = "loop"\nworkload = "small"\nreason = "slow"\n'
    narrow = edited(("threshold = 0", 'threshold = 0\nworkloads = ["large"]'),
                    ('gates = ["summed"]', 'gates = ["summed"]\nworkloads = ["large"]'),
                    ('"abba"', '"abba"\nblocks = 1000'))  # fmt: skip
    plan = protocol(appended(exclusion, to=narrow))
    enumerate_cells(plan)
    tracemalloc.start()
    cells = enumerate_cells(plan)
    run = cells.running()
    lines = list_digest(cell_lines(cells))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(cells), len(run), lines.count) == (24_000, 18_000, 24_000)
    assert peak < 24_000 * 30
    assert list(run) == [cell for cell in cells if cell.excluded is None]
    assert cells[7:9] == [cells[7], cells[8]] != cells[8:10]
    assert cells[-1] == list(cells)[-1]


def test_names_of_cells_are_looked_up_without_being_kept() -> None:
    """P-08: a name is a cell's if it is spelled as the plan spells it, and that cell is among those asked."""
    part = enumerate_cells(protocol())[4:9]
    assert list(part.names) == [cell.cell for cell in part]
    assert len(part.names) == 5
    assert all(name in part.names for name in ("c000004", "c000008"))
    others = ["c000003", "c000009", "c00004", "c0000004", "c+00004", "c00000٤", "d000004", "", "c999999", 4]
    assert not any(name in part.names for name in others)
