"""When an attempt shows that it is alive."""

from __future__ import annotations

FIRST_HEARTBEAT_MS = 1_000
HEARTBEAT_MS = 5_000
HEARTBEAT_MS_MAX = 60_000
HEARTBEAT_GROWTH = 100


def heartbeat_interval_ms(elapsed_ms: int) -> int:
    """Return when the next heartbeat is due: after 5 s, growing to a hundredth of the time elapsed, at most 60 s.

    So a ledger stays small however long an attempt runs, and the last heartbeat, which is the lower bound of an
    unobserved charge, misses at most 1 % of it, or 5 s.
    """
    return max(HEARTBEAT_MS, min(elapsed_ms // HEARTBEAT_GROWTH, HEARTBEAT_MS_MAX))
