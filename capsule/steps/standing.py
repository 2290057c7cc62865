"""Where a protocol stands: its manifests, plan, ledger and journals, read together and derived, never remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capsule.core.account import Account
from capsule.core.chain import Chain, Head
from capsule.core.digest import digest_of
from capsule.core.errors import BrokenError
from capsule.core.manifest import FileDigest
from capsule.core.plan import Cell
from capsule.core.progress import reserved_processes
from capsule.core.record import Journal, read_journal
from capsule.host.durable import read_regular
from capsule.host.ledger import Ledger
from capsule.host.workspace import Generation, Workspace


@dataclass(frozen=True)
class Standing:
    """Everything that deriving status, progress and results needs, read at one moment."""

    generations: list[Generation]
    cells: Sequence[Cell]
    ledger: bytes
    head: Head
    chain: Chain
    account: Account
    journals: dict[str, Journal]

    @property
    def generation(self) -> Generation:
        """The manifest in force."""
        return self.generations[-1]


def standing(workspace: Workspace, generation: Generation | None = None) -> Standing:
    """Read where a protocol stands under the manifest in force, or under the one that is given.

    Raises:
        IncompleteError: nothing is frozen.
        RefusedError: the ledger is damaged; the message says where.
    """
    generations = [generation] if generation else workspace.chain()
    cells = generations[-1].cells
    ledger = Ledger(workspace.ledger, workspace.head)
    chain, account = ledger.read()
    data = workspace.ledger.read_bytes() if workspace.ledger.exists() else b""
    journals = read_journals(workspace, generations[-1], cells, account)
    return Standing(generations, cells, data, chain.head, chain, account, journals)


def read_journals(
    workspace: Workspace, generation: Generation, cells: Sequence[Cell], account: Account
) -> dict[str, Journal]:
    """Read the journal of every attempt that started under this manifest.

    Raises:
        BrokenError: a journal is not the one that the ledger recorded.
    """
    plan = reserved_processes(cells, account)
    identity = generation.manifest.identity
    journals: dict[str, Journal] = {}
    for attempt in account.attempts.values():
        if attempt.reserved is None or attempt.refused is not None or attempt.reserved.manifest != identity:
            continue
        path = workspace.attempts / attempt.id / "journal.jsonl"
        data = read_regular(path) or b""
        recorded = attempt.end.files.get("journal.jsonl") if attempt.end is not None else None
        if recorded is not None and FileDigest(size=len(data), sha256=digest_of(data)) != recorded:
            raise BrokenError(
                f"{path}: expected the journal with {recorded.sha256} that the ledger recorded, found another",
                hint="an attempt's files are evidence and never edited; restore the journal from a copy",
            )
        planned = plan[attempt.reserved.process].names
        journals[attempt.id] = read_journal(data, generation.manifest.protocol.observations, planned)
    return journals
