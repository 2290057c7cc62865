"""The end of an attempt that was seen to its end: its files finished, its outcome judged, its charge written."""

from __future__ import annotations

from capsule.core.attempt import EVIDENCE_MAX, Settled
from capsule.core.errors import shortened
from capsule.core.telemetry import worst
from capsule.host.attempt_files import finish_files, irregular_words, redact_records
from capsule.host.attempt_run import AttemptRun, Seen
from capsule.host.clock import same_boot
from capsule.host.durable import sync
from capsule.host.preflight import source_drifts
from capsule.host.process import is_alive
from capsule.host.settlement import (
    cause_of_sigkill,
    clock_step,
    cut_journal,
    foreign_imports,
    judge,
    memory_hint,
    observed_charge,
    read_rows,
    stray_provenance,
    suspended_ms,
    write_end_record,
)


def settle(run: AttemptRun, seen: Seen) -> None:
    """Settle an attempt whose trial has ended and whose devices were waited for.

    Raises:
        CapsuleError: the ledger cannot be written, or a device not be barred.
        OSError: a file of the attempt cannot be finished.
    """
    order, watchdog = run.order, run.watchdog
    exited, leaked, clean = seen
    released = clean.released
    run.sampler.kill()
    if exited.exit_code == 0 and order.kind == "command":
        write_end_record(run.journal)
    sync(run.journal)
    run.telemetry.close()
    irregular = [*irregular_words(run.directory), *stray_provenance(run.directory)]
    cut = cut_journal(run.directory)
    redact_records(run.directory, run.book.secrets, order.observations)
    journal = read_rows(order)
    drift = source_drifts(order.trees)
    foreign = foreign_imports(order, journal)
    found = run.telemetry.judge(order, run.leased, released)
    outcome, evidence = judge(
        order,
        exited,
        journal,
        cause=run.cause,
        device=found.fault,
        shared=found.shared,
        killed=cause_of_sigkill(exited, run.tree.cgroup, sorted(run.tree.seen), run.leased),
        leaked=leaked,
        drift=drift,
        foreign=foreign,
        cut=cut,
    )
    notes = [*(watchdog.output_failures if watchdog else ()), *irregular, *found.notes]
    if cut is not None and outcome != "bad_records":
        notes.append(cut)
    if drift is not None and outcome != "source_changed":
        notes.append(drift)
    if not clean.clean:
        notes.append(f"the device is not clean: {clean.evidence}")
    if same_boot(order.launcher.boot_id, run.leased.boot_id) and not is_alive(order.launcher):
        notes.append("cli_lost: the command that started this attempt was gone before its end")
    notes += [words for words in (memory_hint(order, exited, journal), clock_step(run.leased, released)) if words]
    for device, words in found.suspects.items():
        run.book.quarantine(device, words, released)
    charge = observed_charge(len(order.reserved.devices), run.leased, released)
    settled = Settled(
        outcome=outcome,
        evidence=shortened(run.book.shown("; ".join([evidence, *notes])), EVIDENCE_MAX),
        charge=charge,
        overrun_ms=max(0, charge.debited_ms - order.reserved.reserved_ms),
        suspended_ms=suspended_ms(run.leased, released),
        exclusivity=worst(found.devices.values()),
        telemetry=found.devices,
        rows=len(journal.rows),
        files=finish_files(run.directory, order.limits.output_bytes_max, run.book.secrets, order.observations),
    )
    run.book.forget_secrets()
    run.tree.forget()
    run.book.append("settled", settled)
