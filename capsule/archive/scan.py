"""The sequence of data frames of a stream: in order, decoded in parallel, and found again after damage.

Findings are values in the sequence. After bytes that are no frame the scan goes on at the next place where a whole
frame begins, so that damage stays local. Nothing here depends on the index or on whether the stream can seek.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from capsule.archive.frames import MAGIC, Decoded, Frame, decode, measure
from capsule.archive.index import INDEX_START, SKIPPABLE
from capsule.archive.model import ContainerError, Finding
from capsule.archive.source import Source

TRIES_MAX = 256
"""False starts of a frame that a scan follows after damage, over the whole file: bounds hostile input."""


class FrameScan:
    """Iterates over frames and findings; ends before the index, at the end of the stream, or when it gives up.

    After the first finding the end is always that of the stream: the index of a damaged file says nothing.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tries = 0
        self.damaged = False

    def __iter__(self) -> Iterator[Frame | Finding]:
        source = self._source
        while source.available(1):
            if INDEX_START.startswith(source.peek(0, len(INDEX_START))):
                if not self.damaged or not self._resume():
                    return
                continue
            frame = self._next()
            if isinstance(frame, Finding):
                self.damaged = True
                yield frame
                if not self._resume():
                    return
            else:
                source.skip(len(frame.data))
                yield frame

    def _next(self) -> Frame | Finding:
        """Return the frame at the cursor, without moving."""
        source = self._source
        try:
            size, raw_size = measure(source)
        except ContainerError as error:
            return error.finding
        follows = source.peek(size, 4)
        frame = Frame(source.offset, source.view(size), raw_size)
        if follows and follows != MAGIC and follows not in SKIPPABLE:
            # Either this frame's length is wrong or what follows is damaged; only decoding can tell.
            return decode(frame).finding or frame
        return frame

    def _resume(self) -> bool:
        """Move to the next place where a whole frame begins; false if there is none."""
        source = self._source
        while self._tries < TRIES_MAX:
            source.skip(source.available(1))
            if not source.find(MAGIC):
                return False
            if isinstance(self._next(), Frame):
                return True
            self._tries += 1
        return False


def decoded(frames: FrameScan, threads: int) -> Generator[Decoded | Finding, None, None]:
    """Yield the frames of a scan in order, each decoded; `threads` decode ahead.

    An error of a decoder other than damage is raised here: it never passes for a sound frame.
    """
    if threads < 1:
        yield from (item if isinstance(item, Finding) else decode(item) for item in frames)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="capsule-decode") as pool:
        waiting: deque[Finding | Future[Decoded]] = deque()
        try:
            for item in frames:
                waiting.append(item if isinstance(item, Finding) else pool.submit(decode, item))
                if len(waiting) > threads:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _result(item: Finding | Future[Decoded]) -> Decoded | Finding:
    return item if isinstance(item, Finding) else item.result()
