"""Settling what a crash left open: every open attempt whose supervisor is gone gets its bounds, once.

An attempt with a live supervisor is left alone, also one that has gone silent: its lease is never stolen. What a dead
supervisor left running, its watchdog included, is ended first, and charged to its observed end. Otherwise the end was
not observed: the charge lies between the last durable event and the first proof of death, and the upper bound is
debited. What is not known is never refunded. A second call finds nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from capsule.core.attempt import (
    EVIDENCE_MAX,
    Attempt,
    Charge,
    Clock,
    Event,
    HeldUnknown,
    Outcome,
    Reconciled,
    Reserved,
)
from capsule.core.errors import MachineError, shortened
from capsule.core.protocol import Budget
from capsule.host import cgroup
from capsule.host.attempt_files import (
    finish_files,
    forget_secrets,
    irregular_words,
    kept_secrets,
    secrets_of,
    without_secrets,
)
from capsule.host.clock import ClockSource, read_boot_id, read_clock, realtime_ms, same_boot
from capsule.host.devices import backend_for
from capsule.host.heartbeats import heartbeat_interval_ms
from capsule.host.killable import call
from capsule.host.launch import LaunchOrder
from capsule.host.lease import lease_path, quarantine, read_holder
from capsule.host.ledger import Ledger, Transaction
from capsule.host.preflight import TREE, baseline_of
from capsule.host.process import (
    Identity,
    Stat,
    descendants,
    end_tree,
    is_alive,
    lock_owners,
    read_stat,
    recorded,
    send,
    survivors,
    with_environment,
)
from capsule.host.settlement import cut_journal, observed_charge, read_rows, stray_provenance
from capsule.host.telemetry_file import mend
from capsule.host.traces import ENGINE, SEEN, Traces, read_traces

SILENT_INTERVALS = 3
"""After that many intervals between heartbeats without one, a supervisor that lives has gone silent."""
_OUTPUT = Budget.model_fields["output_bytes_max"]
ENDING_SECONDS = 30.0
"""How long what a dead supervisor left may take to die; what lives longer is reported and not settled."""


@dataclass(frozen=True)
class Finding:
    """What was found of one open attempt, and done about it."""

    attempt: str
    state: Literal[
        "starting", "queued", "running", "silent", "watched", "unknown", "reconciled", "corrected", "unaccounted"
    ]
    words: str


@dataclass(frozen=True)
class Ending:
    """How an unobserved attempt ended, as far as that can be known."""

    outcome: Outcome
    evidence: str
    charge: Charge


def reconcile(ledger: Ledger, attempts_dir: Path, lease_dir: Path, *, clock: ClockSource = read_clock) -> list[Finding]:
    """Look at every open attempt of this machine, settle those without a supervisor, and say what was found.

    An attempt that was handed to an engine (it has an `engine.json`) is left to that: no process of it need be here.
    """
    chain, account = ledger.read()
    if chain.tail:
        ledger.seal(clock())
    findings = []
    for attempt in account.attempts.values():
        if attempt.open and not os.path.lexists(attempts_dir / attempt.id / ENGINE):
            traces = read_traces(attempts_dir / attempt.id)
            events = [event for event in chain.events if event.attempt == attempt.id]
            findings.append(_reconcile_one(ledger, attempt, events, traces, lease_dir, clock))
    return findings


def liveness(attempt: Attempt, attempts_dir: Path, last: Clock, now: Clock) -> str:
    """Say whether somebody looks after an open attempt, whose last event is of `last`; changes nothing.

    `watched`: its supervisor is gone, and its watchdog ends it at its wall limit, unless another command does before.
    """
    traces = read_traces(attempts_dir / attempt.id)
    holder = _living_holder(attempt, last, traces, now)
    if holder is None or holder.state == "reconciled":
        return "watched" if _watchdog(traces) is not None else "lost"
    return holder.state


def _watchdog(traces: Traces) -> Stat | None:
    """Return an attempt's watchdog if it lives."""
    found = traces.whereabouts.watchdog if traces.whereabouts else None
    return read_stat(found.pid) if found is not None and is_alive(found) else None


def _reconcile_one(
    ledger: Ledger, attempt: Attempt, events: Sequence[Event], traces: Traces, lease_dir: Path, clock: ClockSource
) -> Finding:
    holder = _living_holder(attempt, events[-1].at, traces, clock())
    if holder is not None:
        return holder
    left = _leftovers(attempt, traces, lease_dir)
    if left:
        left = _end(attempt, traces, lease_dir)
        if left:
            pids = ", ".join(str(item.pid) for item in left)
            return Finding(attempt.id, "silent", f"its supervisor is gone and pid {pids} cannot be ended")
        killed = True
    elif _held_by_unknown(attempt, traces, ledger, lease_dir):
        return Finding(attempt.id, "silent", "its lease is still held, by a process that cannot be seen from here")
    else:
        killed = False
    unclean = _await_clean(attempt, traces, lease_dir)
    now = clock()
    for device, words in unclean.items():
        assert traces.order is not None
        quarantine(
            lease_dir,
            device,
            words=f"not clean after its last attempt: {words}",
            attempt=attempt.id,
            protocol=traces.order.protocol,
            since=now.realtime,
        )
    ending = _ending(attempt, events, traces, now, killed=killed)
    return write_end(ledger, attempt, traces, ending, clock)


def _living_holder(attempt: Attempt, last: Clock, traces: Traces, now: Clock) -> Finding | None:
    """Return the finding for an attempt that somebody still looks after."""
    supervisor = traces.whereabouts.supervisor if traces.whereabouts else None
    if supervisor is not None and is_alive(supervisor):
        silent_ms = now.boottime_ms - last.boottime_ms
        elapsed_ms = last.boottime_ms - attempt.intent.leased.boottime_ms if attempt.intent else 0
        if silent_ms < SILENT_INTERVALS * heartbeat_interval_ms(elapsed_ms):
            return Finding(attempt.id, "running", f"supervisor pid {supervisor.pid}")
        found = read_stat(supervisor.pid)
        stopped = " and is stopped" if found is not None and found.state in "Tt" else ""
        words = f"supervisor pid {supervisor.pid} lives{stopped}, and has written nothing for {silent_ms / 1000:.0f} s"
        return Finding(attempt.id, "silent", words)
    if attempt.state == "reserved" and supervisor is None and traces.launcher and is_alive(traces.launcher):
        return Finding(attempt.id, "starting", f"pid {traces.launcher.pid} is about to start it")
    return None


# What a dead supervisor left running.


def _leftovers(attempt: Attempt, traces: Traces, lease_dir: Path) -> list[Stat]:
    """Return the live processes that are certainly of this attempt's tree: a reused pid never is."""
    found: list[Stat] = []
    spawned = attempt.spawned
    if spawned is not None and attempt.intent is not None:
        leader = Identity(pid=spawned.pid, start_ticks=spawned.start_ticks, boot_id=attempt.intent.leased.boot_id)
        stat = read_stat(spawned.pid)
        if stat is not None and is_alive(leader):
            found += [stat, *descendants(spawned.pid)]
    watchdog = _watchdog(traces)
    if watchdog is not None:
        found += [watchdog, *descendants(watchdog.pid)]
    found += [item for item in survivors(recorded(traces.directory / SEEN)) if _is_of_owner(item, traces)]
    if traces.order is not None:
        found += with_environment(TREE, traces.order.token)
        found += filter(None, map(read_stat, _cgroup_processes(traces, traces.order)))
        for device in traces.order.reserved.devices:
            path = lease_path(lease_dir, device)
            holder = read_holder(path)
            if holder is not None and holder.token == traces.order.token:
                found += lock_owners(path)
    distinct = {(item.pid, item.start_ticks): item for item in found if item.pid != os.getpid()}
    return list(distinct.values())


def _is_of_owner(process: Stat, traces: Traces) -> bool:
    """Whether a process that a file in the attempt's folder names runs as whom that folder belongs to."""
    try:
        return Path(f"/proc/{process.pid}").stat().st_uid == traces.directory.stat().st_uid
    except OSError:
        return False


def _cgroup_processes(traces: Traces, order: LaunchOrder) -> list[int]:
    """Return who is in the attempt's own cgroup; an empty one is removed.

    It is also looked for where it is made: a supervisor that was killed there has not named it yet.
    """
    name = f"capsule-{order.token}"
    found = set(cgroup.places(name))
    if traces.whereabouts and traces.whereabouts.cgroup and Path(traces.whereabouts.cgroup).name == name:
        found.add(Path(traces.whereabouts.cgroup))
    pids: list[int] = []
    for path in found:
        inside = cgroup.Cgroup(path).processes()
        pids += inside
        if not inside:
            cgroup.Cgroup(path).remove()
    return pids


def _end(attempt: Attempt, traces: Traces, lease_dir: Path) -> list[Stat]:
    """End what is left: ask, wait for the kill grace, kill; returns what would not die."""
    grace_ms = traces.order.limits.kill_grace_ms if traces.order else 0
    kill_at = time.monotonic() + grace_ms / 1000
    asked: set[tuple[int, int]] = set()
    while left := _leftovers(attempt, traces, lease_dir):
        now = time.monotonic()
        if now >= kill_at:
            return end_tree(lambda: _leftovers(attempt, traces, lease_dir), seconds=ENDING_SECONDS)
        for item in left:
            if item.name not in asked:
                asked.add(item.name)
                send(item, signal.SIGTERM)
        time.sleep(0.02)
    return []


def _held_by_unknown(attempt: Attempt, traces: Traces, ledger: Ledger, lease_dir: Path) -> bool:
    """Whether a lease says that this attempt holds it and is locked, by a process that cannot be found."""
    assert attempt.reserved is not None
    protocol = ledger.read()[1].protocol
    for device in attempt.reserved.devices:
        path = lease_path(lease_dir, device)
        holder = read_holder(path)
        if holder is None or (holder.protocol, holder.attempt) != (protocol, attempt.id):
            continue
        if traces.order is not None and holder.token != traces.order.token:
            continue
        if _is_locked(path):
            return True
    return False


def _is_locked(path: Path) -> bool:
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


# What it cost.


def _ending(attempt: Attempt, events: Sequence[Event], traces: Traces, now: Clock, *, killed: bool) -> Ending:
    assert attempt.reserved is not None
    devices = len(attempt.reserved.devices)
    if attempt.intent is None:
        none = Charge(lower_ms=0, upper_ms=0, debited_ms=0, observed=True)
        return Ending("never_started", "no intent was written, so nothing was started", none)
    leased = attempt.intent.leased
    failure, note = traces.failure, traces.note
    outcome: Outcome = "ledger_failed" if failure else "lost"
    why = f"its supervisor could not write the ledger: {failure.words}" if failure else "its supervisor is gone"
    why += f"; {note.words}" if note else ""
    if attempt.released is not None:
        charge = observed_charge(devices, leased, attempt.released)
        return Ending(outcome, f"{why}; the device had been released", charge)
    if killed:
        return Ending(outcome, f"{why}; what it had left running was ended now", observed_charge(devices, leased, now))
    last, dead, proof = _last_sign_of_life(events), now, "this reconciliation"
    for event in events:
        if event.name == "held_unknown":
            dead, proof = event.at, "an earlier reconciliation"
            break
    seen = failure or note
    if seen is not None and same_boot(seen.emptied.boot_id, leased.boot_id):
        released_ms = seen.emptied.boottime_ms + _release_ms(attempt.reserved, traces)
        if not same_boot(dead.boot_id, leased.boot_id) or released_ms < dead.boottime_ms:
            dead = seen.emptied.model_copy(update={"boottime_ms": released_ms})
            proof = f"its {'supervisor' if failure else 'watchdog'}'s note that the tree was empty"
    lower = devices * (last.boottime_ms - leased.boottime_ms)
    if same_boot(dead.boot_id, leased.boot_id):
        upper = devices * (dead.boottime_ms - leased.boottime_ms)
        evidence = f"{why}; last event at {last.realtime}, first proof of its end {proof} at {dead.realtime}"
    else:
        outcome = outcome if failure else "host_crash"
        upper = _upper_after_boot(attempt.reserved.reserved_ms, devices, leased, dead)
        evidence = f"the machine started again; last event at {last.realtime}, no process outlives a boot"
    upper = max(lower, upper)
    return Ending(outcome, evidence, Charge(lower_ms=lower, upper_ms=upper, debited_ms=upper, observed=False))


def _release_ms(reserved: Reserved, traces: Traces) -> int:
    """Return how long after the end of its tree an attempt's device may still have been in use."""
    if reserved.unit == "cpu":
        return 0
    return traces.order.limits.release_grace_ms if traces.order else reserved.reserved_ms


def _await_clean(attempt: Attempt, traces: Traces, lease_dir: Path) -> dict[str, str]:
    """Wait until the attempt's devices are back at their baseline, at most for the grace: until then it is charged.

    A device that was released or reset since, or that somebody else has leased since, had been back. Returns words on
    each that is not, for no reason that can be seen.
    """
    order, intent = traces.order, attempt.intent
    if order is None or intent is None or order.reserved.unit == "cpu" or attempt.released is not None:
        return {}
    if attempt.state == "held" or not same_boot(intent.leased.boot_id, read_boot_id()):
        return {}
    holders = {device: read_holder(lease_path(lease_dir, device)) for device in order.reserved.devices}
    devices = [device for device, holder in holders.items() if holder is None or holder.token == order.token]

    def unclean() -> dict[str, tuple[str, bool]]:
        """Return words on what is not clean, and whether somebody else's process is there."""
        found = {}
        for uuid in devices:
            backend = backend_for(uuid)
            if words := backend.unclean(uuid, baseline_of(intent.device_baseline, uuid)):
                found[uuid] = words, backend.occupancy(uuid, own=()).exclusivity == "contaminated"
        return found

    found: dict[str, tuple[str, bool]] = {}
    until = time.monotonic() + order.limits.release_grace_ms / 1000
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(MachineError):
            found = call(unclean, max(1.0, left))
            if not found:
                break
        time.sleep(0.1)
    return {uuid: words for uuid, (words, shared) in found.items() if not shared}


def _last_sign_of_life(events: Sequence[Event]) -> Clock:
    """Return the clock of the last event that the attempt's own supervisor wrote."""
    return [event.at for event in events if event.name != "held_unknown"][-1]


def _upper_after_boot(reserved_ms: int, devices: int, leased: Clock, now: Clock) -> int:
    """Bound by the wall clock: no later than the new boot, and than the reservation's end."""
    boot_ms = realtime_ms(now.realtime) - now.boottime_ms
    elapsed_ms = boot_ms - realtime_ms(leased.realtime)
    return min(devices * elapsed_ms, reserved_ms) if elapsed_ms > 0 else reserved_ms


def write_end(ledger: Ledger, attempt: Attempt, traces: Traces, ending: Ending, clock: ClockSource) -> Finding:
    """Finish an attempt's files and write its end, unless another command has moved it on meanwhile."""
    order = traces.order
    mend(traces.directory, sampled=attempt.reserved is not None and attempt.reserved.unit != "cpu")
    irregular, cut = irregular_words(traces.directory), cut_journal(traces.directory)
    if order is None or order.kind == "command":
        irregular += stray_provenance(traces.directory)
    secrets = [*secrets_of(order.secrets if order else ()), *kept_secrets(traces.directory)]
    why = shortened(without_secrets(ending.evidence, secrets), EVIDENCE_MAX)
    evidence = "; ".join([why, *irregular, *([cut] if cut else [])])
    output_bytes_max = order.limits.output_bytes_max if order else int(_OUTPUT.default)
    files = finish_files(traces.directory, output_bytes_max, secrets, order.observations if order else ())
    rows = len(read_rows(order).rows) if order else 0
    with contextlib.suppress(OSError):
        forget_secrets(traces.directory)

    def work(transaction: Transaction) -> bool:
        current = transaction.account.attempts[attempt.id]
        if current.state != attempt.state:
            return False
        if current.state != "held":
            transaction.append("held_unknown", attempt.id, HeldUnknown(evidence=why), clock())
        reconciled = Reconciled(outcome=ending.outcome, evidence=evidence, charge=ending.charge, rows=rows, files=files)
        transaction.append("reconciled", attempt.id, reconciled, clock())
        return True

    if not ledger.transaction(work):
        return Finding(attempt.id, "running", "another command has moved it on meanwhile")
    charge = ending.charge
    bounds = "" if charge.observed else f" (between {charge.lower_ms / 1000:g} and {charge.upper_ms / 1000:g})"
    words = f"{ending.outcome}: {charge.debited_ms / 1000:g} device-seconds debited{bounds}; {evidence}"
    return Finding(attempt.id, "reconciled", words)
