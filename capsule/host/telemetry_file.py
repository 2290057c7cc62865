"""The telemetry of one attempt on its way into its file, and what it means for the attempt's outcome."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capsule.core.attempt import Clock, Outcome
from capsule.core.canonical import canonical_line
from capsule.core.telemetry import DeviceTelemetry, Sample, read_samples, summarize, torn_bytes, worst
from capsule.host.attempt_files import set_aside
from capsule.host.durable import create, read_regular, sync, write
from capsule.host.launch import LaunchOrder

TELEMETRY = "telemetry.jsonl"
BYTES_MAX = 64 * 2**20
"""A longer file could not be read from a capsule; later samples are left out, and their time counts as not observed."""


@dataclass(frozen=True)
class Findings:
    """What the samples say of an attempt.

    `devices` holds what they add up to, `fault` what decides the outcome whatever the trial did, `shared` that a device
    was not exclusive although that is required, `suspects` the devices that must not be used again and why.
    """

    devices: dict[str, DeviceTelemetry]
    fault: tuple[Outcome, str] | None
    shared: tuple[Outcome, str] | None
    notes: list[str]
    suspects: dict[str, str]


class TelemetryFile:
    """The samples of one attempt; a full disk costs samples and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.failure: str | None = None
        self._path = directory / TELEMETRY
        self._descriptor = -1
        self._size = 0
        self._digest = hashlib.sha256()

    def write(self, sample: Sample) -> bool:
        """Append a sample; whether it is kept."""
        line = canonical_line(sample.to_json())
        if self.failure is None and self._size + len(line) > BYTES_MAX:
            self.failure = f"telemetry ends at {BYTES_MAX} bytes"
        if self.failure is not None:
            return False
        try:
            if self._descriptor < 0:
                self._descriptor = create(self._path, os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW)
            write(self._descriptor, line)
        except OSError as error:
            self._fail(error)
            if self._descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            return False
        self._size += len(line)
        self._digest.update(line)
        return True

    def sync(self) -> None:
        """Make what was written durable."""
        if self._descriptor >= 0:
            try:
                sync(self._descriptor)
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """End writing, when the trial has ended; a file that is not as it was written counts as absent."""
        self.sync()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if (self._descriptor < 0 and os.path.lexists(self._path)) or not self._is_untouched():
            self.failure = f"{TELEMETRY} was written by somebody else and counts as absent"
            self._size = 0
            set_aside(self._path)

    def _fail(self, error: OSError) -> None:
        self.failure = self.failure or f"telemetry could not be kept whole: {error.strerror}"

    def judge(self, order: LaunchOrder, leased: Clock, released: Clock) -> Findings:
        """Add the samples up over the attempt, from its lease to its release, and say what they mean for it."""
        devices: dict[str, DeviceTelemetry] = {}
        faults: list[tuple[Outcome, str]] = []
        notes = [self.failure] if self.failure else []
        suspects: dict[str, str] = {}
        for device in order.reserved.devices if self._size else ():
            devices[device] = summarize(device, self._read(), leased.boottime_ms, released.boottime_ms)
            first: Sample | None = None
            for sample in self._read():
                if sample.device != device:
                    continue
                if sample.lost:
                    suspects.setdefault(device, f"lost: {sample.error}")
                    faults.append(("device_lost", f"{device}: {sample.error}"))
                    break
                first = first or (sample if sample.error is None else None)
                moved = _moved(first, sample) if first is not None else None
                if moved is not None:
                    faults.append((moved[0], f"{device}: {moved[1]}"))
                    if moved[0] == "device_suspect":
                        suspects.setdefault(device, moved[1])
                    break
            notes += [f"{device}: the driver reported Xid {number}" for number in self._xids(device)]
        exclusivity = worst(devices.values())
        shared: tuple[Outcome, str] | None = None
        if exclusivity != "exclusive":
            evidence = next(
                (item.evidence for item in devices.values() if item.exclusivity == exclusivity), "no sample was kept"
            )
            if order.exclusivity == "required":
                shared = exclusivity, evidence
            elif exclusivity == "contaminated":
                notes.append(f"contaminated: {evidence}")
        return Findings(devices, faults[0] if faults else None, shared, notes, suspects)

    def _read(self) -> Iterator[Sample]:
        with self._path.open("rb") as file:
            for line in file:
                yield Sample.from_bytes(line.removesuffix(b"\n"), TELEMETRY)

    def _is_untouched(self) -> bool:
        """Whether the file is what was written, but for a part of a line at its end, which is cut off.

        A trial runs as the same user and could write there.
        """
        if self._descriptor < 0:
            return True
        data = read_regular(self._path, self._size) or b""
        if hashlib.sha256(data).digest() != self._digest.digest():
            return False
        os.truncate(self._path, self._size)
        return True

    def _xids(self, device: str) -> list[int]:
        return sorted({sample.xid for sample in self._read() if sample.device == device and sample.xid})


def mend(directory: Path, *, sampled: bool) -> None:
    """Cut a last line that was not written whole, as a supervisor leaves it that was killed or ran out of disk.

    What is no telemetry at all, or stands there although nothing was sampled, is set aside.
    """
    path = directory / TELEMETRY
    if not os.path.lexists(path):
        return
    data = read_regular(path, BYTES_MAX) or b""
    if not sampled or any(isinstance(item, str) for item in read_samples(data)):
        set_aside(path)
    elif torn_bytes(data):
        os.truncate(path, len(data) - torn_bytes(data))


def _moved(first: Sample, later: Sample) -> tuple[Outcome, str] | None:
    """Compare a sample with the first one: counters of memory errors, and how the device is partitioned.

    Corrected errors are recorded and no reason to doubt a device: its memory made them good.
    """
    for name in ("ecc_uncorrected", "remapped_rows"):
        before, after = getattr(first, name), getattr(later, name)
        if before is not None and after is not None and after != before:
            return "device_suspect", f"{name} moved from {before} to {after}"
    if None not in (first.layout, later.layout) and first.layout != later.layout:
        return "config_changed", f"the layout changed from {first.layout} to {later.layout}"
    return None
