"""The sampler: the one process of an attempt that asks the driver, killable, since a driver's call can hang for ever.

It is forked from the supervisor and opens the driver before the lease is taken, looks at the leased devices when told
to, and from then on takes samples and answers questions. Losing it costs samples, never control of the trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from capsule.core.errors import MachineError
from capsule.core.telemetry import SAMPLE_MS, Sample, interval_ms
from capsule.host.clock import ClockSource
from capsule.host.devices import Backend, backend_for
from capsule.host.devices.base import Baseline
from capsule.host.forks import fork_helper, name_process
from capsule.host.killable import call
from capsule.host.lease import Holder
from capsule.host.loop import Loop, received, void
from capsule.host.preflight import Refusal, baseline_of, inspect_devices
from capsule.host.process import descendants

MESSAGE_BYTES = 1 << 20
VISIBLE_SECONDS = 20.0
WHOLE_MS = 2_000
"""So often at least a sample is whole, with what costs more than all the rest; those around an attempt always are."""
TURN_MS = 50
REVIVALS_MAX = 10
"""How often a sampler that ended is replaced in one attempt."""


class Sampler:
    """The supervisor's handle on its sampler; `take` is called with every sample as it comes."""

    def __init__(self, devices: Sequence[str], loop: Loop, clock: ClockSource, take: Callable[[Sample], None]) -> None:
        self.gone = False
        self._revivals = 0
        self._asked = 0
        self._loop = loop
        self._take = take
        self._clock = clock
        self._devices = tuple(devices)
        self._answer: Any = None
        self._start()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watched = os.getpid()
        eye = _Eye(self._devices, theirs, self._clock, watched)
        self.pid = fork_helper(eye.run, keep=[theirs.fileno()], dies_with_parent=True)
        theirs.close()
        self._channel.setblocking(False)
        self._loop.watch(self._channel.fileno(), self._listen)

    def revive(self, baseline: Baseline) -> None:
        """Start another process in the place of one that has ended, which goes on with samples."""
        if not self.gone or self._revivals == REVIVALS_MAX:
            return
        self._revivals += 1
        self._channel.close()
        self._start()
        self.gone = False
        self._send({"ask": "watch", "baseline": baseline})

    def open(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Wait until the driver was opened, which can take seconds that no attempt should be charged.

        Raises:
            MachineError: a device is not there, or the driver does not answer in time.
        """
        self._ask({"ask": "open"}, seconds, cancelled)

    def inspect(
        self,
        inherited: Mapping[str, Holder],
        exclusivity: Literal["required", "best_effort"],
        seconds: float,
        cancelled: Callable[[], bool],
    ) -> tuple[Baseline, dict[str, str]]:
        """Look at the leased devices, and take samples from now on; returns their baseline and a trial's environment.

        Raises:
            Refusal: a device is not idle, or not known to be where that is required.
            MachineError: a device is not there or does not answer in time.
        """
        left = {uuid: holder.to_json() for uuid, holder in inherited.items()}
        answer = self._ask({"ask": "inspect", "inherited": left, "exclusivity": exclusivity}, seconds, cancelled)
        return answer["baseline"], answer["environment"]

    def visible(self, environment: Mapping[str, str], cancelled: Callable[[], bool]) -> list[str] | None:
        """Return the UUIDs that a program with this environment can use, or None where the driver does not tell."""
        question = {"ask": "visible", "environment": dict(environment)}
        return self._ask(question, VISIBLE_SECONDS + 1, cancelled)["visible"]  # type: ignore[no-any-return]

    def unclean(self, seconds: float) -> dict[str, str]:
        """Take one more sample; words on each device that is not back at its baseline.

        Raises:
            MachineError: a device is lost, or does not answer in time.
        """
        return self._ask({"ask": "unclean"}, seconds)["unclean"]  # type: ignore[no-any-return]

    def collected(self, pid: int) -> None:
        """Take in that a child of the supervisor ended."""
        if pid == self.pid:
            self._listen()
            self._lose()

    def kill(self) -> None:
        """End the sampler; one that hangs in the driver is left to itself."""
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)

    def _ask(
        self, question: Mapping[str, Any], seconds: float, cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        self._answer = None
        self._asked += 1
        until_ms = self._clock().monotonic_ms + int(seconds * 1000)
        if not self._send({**question, "number": self._asked}):
            raise MachineError("the process that asks the driver does not answer", hint=_HINT)
        while self._answer is None:
            left_ms = until_ms - self._clock().monotonic_ms
            if left_ms <= 0:
                raise MachineError(f"the driver did not answer within {seconds:g} s", hint=_HINT)
            if self.gone:
                raise MachineError("the process that asks the driver has died", hint=_HINT)
            if cancelled():
                raise Refusal("user", "stopped")
            self._loop.turn(min(left_ms, TURN_MS))
        match self._answer:
            case {"refusal": [reason, words]}:
                raise Refusal(reason, words)
            case {"failed": words}:
                raise MachineError(words)
        return dict(self._answer)

    def _send(self, question: Mapping[str, Any]) -> bool:
        try:
            self._channel.send(json.dumps(question).encode())
        except OSError:
            return False
        return True

    def _lose(self) -> None:
        if not self.gone:
            self.gone = True
            self._loop.forget(self._channel.fileno())

    def _listen(self) -> None:
        for data in received(self._channel, MESSAGE_BYTES) if not self.gone else ():
            if not data:
                self._lose()
                return
            message = json.loads(data)
            if "sample" in message:
                self._take(Sample.model_validate_json(json.dumps(message["sample"])))
            elif message["number"] == self._asked:
                self._answer = message["answer"]


class _Eye:
    """What the forked process does."""

    def __init__(self, devices: Sequence[str], channel: socket.socket, clock: ClockSource, watched: int) -> None:
        self.devices = devices
        self.channel = channel
        self.clock = clock
        self.watched = watched
        self.backends: dict[str, Backend] = {}
        self.baseline: Baseline = {}
        self.began_ms: int | None = None
        self.absent: MachineError | None = None
        self.whole_due_ms = 0

    def run(self) -> None:
        name_process(f"capsule sampler of {' '.join(self.devices)}")
        with contextlib.suppress(ConnectionError):  # the supervisor is gone
            self._watch()

    def _watch(self) -> None:
        try:
            self.backends = {uuid: backend_for(uuid) for uuid in self.devices}
            for backend in {type(backend): backend for backend in self.backends.values()}.values():
                if backend.sampled:
                    backend.devices()  # whatever it answers: this opens the driver in this process
        except MachineError as error:
            self.absent = error
        due_ms = 0
        while True:
            now_ms = self.clock().boottime_ms
            timeout = None if self.began_ms is None else max(0, due_ms - now_ms) / 1000
            readable, _, _ = select.select([self.channel], [], [], timeout)
            if readable:
                data = self.channel.recv(MESSAGE_BYTES)
                if not data:
                    return
                self._heed(json.loads(data))
            elif self.began_ms is not None:
                due_ms = self.clock().boottime_ms + interval_ms(now_ms - self.began_ms)
                self._look()

    def _heed(self, question: Mapping[str, Any]) -> None:
        if question["ask"] == "watch":
            self.baseline, self.began_ms = question["baseline"], self.clock().boottime_ms
        else:
            self._tell({"number": question["number"], "answer": self._answer(question)})

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            match question["ask"]:
                case "open":
                    if self.absent is not None:
                        raise self.absent
                    return {}
                case "inspect":
                    return self._inspect(question["inherited"], question["exclusivity"])
                case "visible":
                    return {"visible": self._visible(question["environment"])}
                case _:
                    self._look(whole=True)
                    found = {
                        uuid: backend.unclean(uuid, baseline_of(self.baseline, uuid))
                        for uuid, backend in self.backends.items()
                    }
                    return {"unclean": {uuid: words for uuid, words in found.items() if words}}
        except Refusal as refusal:
            return {"refusal": [refusal.reason, str(refusal)]}
        except MachineError as error:
            return {"failed": error.message}

    def _inspect(self, left: Mapping[str, Any], exclusivity: Literal["required", "best_effort"]) -> dict[str, Any]:
        """Take samples from here on, also while devices settle: time without them would not be observed."""
        inherited = {uuid: Holder.model_validate_json(json.dumps(item)) for uuid, item in left.items()}
        held: list[tuple[Sample, bool]] = []

        def meanwhile(settling: Collection[str]) -> None:
            held.extend((sample, sample.device in settling) for sample in self._samples(whole=True))

        self.baseline = inspect_devices(self.backends, inherited, exclusivity, meanwhile)
        self.began_ms = self.clock().boottime_ms
        now = list(self._samples(whole=True))
        idle = {sample.device for sample in now if sample.exclusivity == "exclusive"}
        for sample, settling in held:
            self._tell({"sample": (_settled(sample) if settling and sample.device in idle else sample).to_json()})
        for sample in now:
            self._tell({"sample": sample.to_json()})
        first = next(iter(self.backends.values()))
        return {"baseline": self.baseline, "environment": first.environment(list(self.backends))}

    def _visible(self, environment: Mapping[str, str]) -> list[str] | None:
        """Let a process of its own ask, which always comes back; samples are taken until it does."""
        backend = next(iter(self.backends.values()))
        if not backend.sampled:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            pid = fork_helper(
                lambda: void(theirs.send(_seen_by(backend, environment))), keep=[theirs.fileno()], dies_with_parent=True
            )
            theirs.close()
            while not select.select([ours], [], [], SAMPLE_MS / 1000)[0]:
                self._look()
            data = ours.recv(MESSAGE_BYTES)
        os.waitpid(pid, 0)
        answer = json.loads(data or '{"failed": "the process that asks what a trial sees has died"}')
        if "failed" in answer:
            raise MachineError(answer["failed"])
        return answer["visible"]  # type: ignore[no-any-return]

    def _look(self, *, whole: bool = False) -> None:
        """Take a sample of every device that can be sampled, a whole one at least every so often, and tell it."""
        now_ms = self.clock().boottime_ms
        if whole := whole or now_ms >= self.whole_due_ms:
            self.whole_due_ms = now_ms + WHOLE_MS
        for sample in self._samples(whole=whole):
            self._tell({"sample": sample.to_json()})

    def _samples(self, *, whole: bool) -> Iterator[Sample]:
        own = _Below(self.watched)
        for uuid, backend in self.backends.items():
            if backend.sampled:
                yield backend.sample(uuid, own, baseline_of(self.baseline, uuid), whole=whole)

    def _tell(self, message: Mapping[str, Any]) -> None:
        self.channel.send(json.dumps(message).encode())


def _seen_by(backend: Backend, environment: Mapping[str, str]) -> bytes:
    """Return which devices a program with this environment can use, or why that is not known."""

    def ask() -> tuple[str, ...] | None:
        os.environ.clear()
        os.environ.update(environment)
        return backend.visible()

    try:
        return json.dumps({"visible": call(ask, VISIBLE_SECONDS)}).encode()
    except MachineError as error:
        return json.dumps({"failed": error.message}).encode()


def _settled(sample: Sample) -> Sample:
    """Return what a sample says once it is known that the utilization in doubt was gone before anything started."""
    if sample.exclusivity != "unverifiable" or sample.error is not None:
        return sample
    words = f"{sample.words}, which it had left before anything was started"
    return sample.model_copy(update={"exclusivity": "exclusive", "words": words})


class _Below(Collection[int]):
    """The pids below a process, looked up anew each time they are asked for."""

    def __init__(self, root: int) -> None:
        self._root = root

    def __iter__(self) -> Iterator[int]:
        return (item.pid for item in descendants(self._root))

    def __contains__(self, pid: object) -> bool:
        return pid in list(self)

    def __len__(self) -> int:
        return len(list(self))


_HINT = "`nvidia-smi` says more about the driver and the device"
