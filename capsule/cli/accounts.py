"""What `run`, `status`, `ledger` and `doctor` say: attempts, what they cost, budgets and devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from capsule.cli.progress import duration
from capsule.cli.watching import View
from capsule.cli.words import Said, columns, paint, safe

if TYPE_CHECKING:
    from capsule.core.attempt import Attempt, Charge
    from capsule.steps.doctor import Examined, Readmitted
    from capsule.steps.run import Ran
    from capsule.steps.slots import DeviceState
    from capsule.steps.status import LedgerView, OutcomeTotal, Status

EXPLAINED = {
    "starting": "its command is about to start it",
    "queued": "its job waits in Slurm's queue",
    "unknown": "Slurm does not answer, or its accounting has not said the last",
    "silent": "its supervisor lives and writes nothing; it is stopped or cannot write",
    "watched": "its supervisor is gone; its watchdog ends it at its wall limit",
    "lost": "nobody looks after it; `capsule reconcile` settles it",
}


def ran(result: Ran) -> Said:
    """Say what a run did and what remains."""
    value = {
        "protocol": result.protocol,
        "manifest": result.manifest,
        "dry_run": result.dry_run,
        "pilot": result.pilot,
        "device": result.device,
        "side_by_side": result.side_by_side,
        "attempts": [
            {
                "attempt": a.id,
                "process": a.process,
                "devices": a.devices,
                "outcome": a.outcome,
                "evidence": a.evidence,
                "debited_ms": a.debited_ms,
            }
            for a in result.attempts
        ],
        "cells": result.cells,
        "remaining_processes": result.remaining,
        "stopped": result.stopped,
        "budget_ms": result.budget_ms,
        "held_ms": result.held_ms,
        "reserved_ms": result.reserved_ms,
    }
    left = f"{_count(result.remaining, 'process')} to run"
    budget = f"{result.held_ms / 1000:.1f} of {result.budget_ms / 1000:g} {result.unit}-seconds spent"
    if result.dry_run:
        worst = f"each may cost {result.reserved_ms / 1000:g} {result.unit}-seconds at worst"
        beside = f", {result.side_by_side} side by side" if result.side_by_side > 1 else ""
        return value, f"{left} on {result.device}{beside}; {worst}; {budget}"
    charged = sum(attempt.debited_ms for attempt in result.attempts) / 1000
    lines = [f"cells: {_cells(result.cells)}", f"charged now: {charged:.1f} {result.unit}-seconds; {budget}"]
    if result.pilot:
        lines.insert(0, "this was a pilot: kept and charged apart, and no cell's row")
    elif result.cells.get("failed"):
        lines.append("failed cells stay in every table; `capsule status` says why each attempt failed")
        if not result.cells.get("ok"):
            lines.append("no cell succeeded, so there is nothing to estimate: mend the trial, then `capsule amend`")
    if result.stopped:
        lines.append(f"stopped: {safe(result.stopped)}")
    if result.remaining:
        lines.append(f"remaining: {left}")
    return value, "\n".join(lines)


def run_exit_code(result: Ran) -> int:
    """Return 4 when the frozen rules stopped the run before its end, else 0."""
    return 4 if result.stopped and not result.dry_run else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def _cells(cells: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in cells.items())


# Attempts and what they cost.


def _attempt(attempt: Attempt, state: str | None) -> dict[str, Any]:
    """Return the object of one attempt; `state` is what an open one is by whether anybody looks after it."""
    source, end = attempt.reserved or attempt.refused, attempt.end
    return {
        "attempt": attempt.id,
        "state": state or attempt.state,
        "process": source.process if source else None,
        "pilot": attempt.pilot,
        "devices": attempt.reserved.devices if attempt.reserved else (),
        "outcome": end.outcome if end else "refused" if attempt.refused else None,
        "evidence": end.evidence if end else attempt.refused.words if attempt.refused else None,
        "held_ms": attempt.held_ms,
        "charge": end.charge.to_json() if end else None,
        "exclusivity": getattr(end, "exclusivity", None),
        "since": attempt.first.realtime if attempt.first else None,
        "until": attempt.last.realtime if attempt.last and not attempt.open else None,
    }


def _cost(attempt: Attempt) -> str:
    """Write what an attempt takes from the budget: bounds where its end was not observed, a reservation while open."""
    seconds = f"{attempt.held_ms / 1000:.3f}"
    if attempt.open:
        return f"{seconds} reserved"
    charge: Charge | None = attempt.end.charge if attempt.end else None
    return seconds if charge is None or charge.observed else f"{seconds} (from {charge.lower_ms / 1000:.3f})"


def _attempt_table(attempts: Iterable[Attempt], states: dict[str, str], *, when: bool = False) -> list[str]:
    rows = []
    for item in attempts:
        value = _attempt(item, states.get(item.id))
        row = [
            item.id,
            "-" if value["process"] is None else str(value["process"]),
            "pilot" if item.pilot else "",
            str(value["outcome"] or value["state"]),
            _cost(item),
            value["exclusivity"] or "-",
            ", ".join(value["devices"]) or "-",
            str(value["evidence"] or EXPLAINED.get(value["state"], ""))[:90],
        ]
        rows.append([*row[:1], str(value["since"]), *row[1:]] if when else row)
    head = ["attempt", "process", "", "outcome", "device-s", "exclusivity", "devices", "why"]
    return [columns(rows, [head[0], "since", *head[1:]] if when else head)] if rows else []


def _totals(totals: Sequence[OutcomeTotal]) -> list[dict[str, Any]]:
    return [{"outcome": t.outcome, "kind": t.kind, "attempts": t.attempts, "held_ms": t.held_ms} for t in totals]


def _totals_table(totals: Sequence[OutcomeTotal]) -> list[str]:
    rows = [(t.outcome, t.kind, str(t.attempts), f"{t.held_ms / 1000:.3f}") for t in totals]
    if not rows:
        return []
    every = sum(t.held_ms for t in totals)
    lost = sum(t.held_ms for t in totals if t.kind in ("failed", "void"))
    share = f" ({100 * lost / every:.0f} %)" if every else ""
    words = f"failed and void attempts cost {lost / 1000:.1f} of {every / 1000:.1f} device-seconds{share}"
    return [columns(rows, ("outcome", "counts as", "attempts", "device-s")), words]


# Status.


def status(result: Status) -> View:
    """Say where a protocol stands."""
    rest = result.rest
    value = {
        "protocol": result.protocol,
        "manifest": result.manifest,
        "generation": result.generation,
        "cells": result.cells,
        "processes": result.processes,
        "remaining_processes": rest.processes,
        "done": not rest.processes and not any(attempt.open for attempt in result.attempts),
        "active": result.active,
        "run": {"pid": result.worker.pid, "since": result.worker.since} if result.worker else None,
        "attempts": [_attempt(a, result.liveness.get(a.id)) for a in result.attempts],
        "totals": _totals(result.totals),
        "budgets": [
            {
                "unit": b.unit,
                "pilot": b.pilot,
                "budget_ms": b.budget_ms,
                "held_ms": b.held_ms,
                "left_ms": b.left_ms,
            }
            for b in result.budgets
        ],
        "remaining": {
            "processes": rest.processes,
            "open": rest.open,
            "cells": rest.cells,
            "worst_ms": rest.worst_ms,
            "expected_ms": rest.expected_ms,
            "seconds": rest.seconds,
        },
        "reserved_ms": result.reserved_ms,
        "devices": [device(item) for item in result.devices],
    }
    lines = [
        f"{result.protocol}, manifest {result.generation}: {result.manifest}",
        f"cells: {_cells(result.cells)}",
        f"processes: {result.processes - rest.processes} of {result.processes} done",
        *_rest_lines(result),
    ]
    for b in result.budgets:
        kind = "pilot budget" if b.pilot else "budget"
        held = f"{b.held_ms / 1000:.1f} of {b.budget_ms / 1000:g} {b.unit}-seconds spent or reserved"
        lines.append(f"{kind}: {held}, {b.left_ms / 1000:.1f} left")
    if result.worker is not None:
        lines.append(f"at work: capsule run, pid {result.worker.pid}, since {result.worker.since}")
    for part in (_attempt_table(result.attempts, result.liveness), _totals_table(result.totals)):
        lines += ["", *part] if part else []
    lines += ["", _device_table(result.devices)]
    if result.devices_missing is not None:
        lines.append(paint(safe(f"devices: {result.devices_missing}"), "doubt"))
    return View(value, "\n".join(lines), result.active)


def _rest_lines(result: Status) -> list[str]:
    rest = result.rest
    if not rest.processes:
        return []
    running = f", {rest.open} of them open" if rest.open else ""
    words = f"remaining: {_count(rest.processes, 'process')}{running}"
    if rest.worst_ms:
        by_pace = f"about {rest.expected_ms / 1000:.1f} by what has ended, " if rest.expected_ms is not None else ""
        words += f"; still to reserve: {by_pace}{rest.worst_ms / 1000:g} device-seconds at worst"
    if rest.seconds is not None:
        words += f"; about {duration(rest.seconds)}"
    lines = [words]
    left = max((b.left_ms for b in result.budgets if not b.pilot), default=None)
    if left is not None and rest.worst_ms > left:
        lines.append(paint(f"the budget has {left / 1000:.1f} left and may not cover the worst case", "doubt"))
    return lines


def status_news(before: dict[str, Any] | None, view: View) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one object, or one line, that says where a protocol stands."""
    value = view.value
    budgets = "; ".join(
        f"{b['held_ms'] / 1000:.1f} of {b['budget_ms'] / 1000:g} {b['unit']}-seconds" for b in value["budgets"]
    )
    going = ", ".join(f"{a['attempt']} {a['state']}" for a in value["attempts"] if a["outcome"] is None)
    done = f"{value['processes'] - value['remaining_processes']} of {value['processes']} processes done"
    return [value], [f"{done}; cells: {_cells(value['cells'])}; open: {going or 'none'}; {budgets}"]


# Ledger.


def ledger(result: LedgerView, *, events: bool) -> View:
    """Say what every attempt cost, or list every event."""
    value = {"events": result.events, "totals": _totals(result.totals)}
    if events:
        rows = [_event_row(event) for event in result.events]
        return View(value, columns(rows, ("seq", "time", "attempt", "event", "data")), result.active)
    parts = (_attempt_table(result.attempts, {}, when=True), _totals_table(result.totals))
    lines = [line for part in parts if part for line in ["", *part]]
    return View(value, "\n".join(lines[1:]) or "no attempt yet", result.active)


def ledger_news(before: dict[str, Any] | None, view: View) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the events that are new, as one object or a line each."""
    events = view.value["events"][len(before["events"]) if before else 0 :]
    return [{"events": events, "totals": view.value["totals"]}], ["  ".join(_event_row(event)) for event in events]


def _event_row(event: dict[str, Any]) -> tuple[str, ...]:
    import json

    return (
        str(event["seq"]),
        event["at"]["realtime"],
        event["attempt"] or "",
        event["event"],
        json.dumps(event["data"])[:100],
    )


# Devices.


def device(state: DeviceState) -> dict[str, Any]:
    """Return the object of one device."""
    return {
        "device": state.device,
        "unit": state.unit,
        "name": state.name,
        "held": state.held,
        "holder": _holder(state.holder),
        "left_by": _holder(state.left),
        "quarantine": state.quarantine.to_json() if state.quarantine else None,
    }


def _holder(holder: Any) -> dict[str, Any] | None:
    if holder is None:
        return None
    return {name: getattr(holder, name) for name in ("protocol", "attempt", "pid", "since")}


def _device_table(devices: Iterable[DeviceState]) -> str:
    rows = []
    for state in devices:
        words = "free"
        if state.held:
            words = "held by a process that has not said who it is"
        if state.holder is not None:
            holder = state.holder
            words = f"held by {holder.attempt} of {holder.protocol}, pid {holder.pid}, since {holder.since}"
        if state.left is not None:
            words = f"free; not given back in order by {state.left.attempt} of {state.left.protocol}"
        if state.quarantine is not None:
            found = state.quarantine
            by = f"{found.attempt} of {found.protocol}"
            words = f"quarantined since {found.since}: {found.words} ({by}){'; ' + words if state.held else ''}"
        rows.append((state.device, state.unit or "?", state.name or "not listed by the driver", words))
    return columns(rows, ("device", "unit", "name", "state"))


def examined(result: Examined) -> Said:
    """Say what `doctor` found."""
    value = {
        "findings": [{"name": f.name, "good": f.good, "words": f.words} for f in result.findings],
        "devices": [device(item) for item in result.devices],
    }
    findings = columns([(f.name, "ok" if f.good else "missing", f.words) for f in result.findings], ("", "", ""))
    lines = [findings, "", _device_table(result.devices)]
    lines += [
        f"lift a quarantine once the device is sound again: capsule doctor --readmit {state.device}"
        for state in result.devices
        if state.quarantine is not None
    ]
    return value, "\n".join(lines)


def readmitted(result: Readmitted) -> Said:
    """Say what was lifted."""
    found = result.quarantine
    value = {"readmitted": result.device, "quarantine": found.to_json()}
    by = f"{found.attempt} of {found.protocol}"
    return value, f"{result.device} may be used again; in quarantine since {found.since}: {safe(found.words)} ({by})"
