"""Evidence: a capsule's members as a reader handed them over, and what the checks have understood of them so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from capsule.core.account import Account
from capsule.core.chain import Walk
from capsule.core.digest import Digests
from capsule.core.ledger_pass import LedgerPass
from capsule.core.lines import Content
from capsule.core.manifest import FileDigest, ListDigest, Manifest, list_digest
from capsule.core.plan import Cell
from capsule.core.record import Journal
from capsule.core.results import Results
from capsule.core.signing import SignatureFound, TokenFound, Trust
from capsule.core.source_list import SourceList

CELLS = "cells.jsonl"

KEPT_BYTES_MAX = 64 << 20
"""Bytes of one member that the checks read; a larger journal or list is a finding, so no run or freeze makes one."""

DOCUMENT_BYTES_MAX = 2 << 20
"""Bytes of one member that is read as one value: a manifest, its protocol, a signature, the ledger's head."""

DOCUMENTS_BYTES_MAX = 8 << 20
"""Bytes of all such members together."""

CHAIN_BYTES_MAX = 6 << 20
"""Bytes of all manifests of a chain with their protocols, which leaves room for what is signed later."""


class Rows(Protocol):
    """The rows of a table, as often as is asked, and how many it declares; raises `MalformedError` over its values."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def __len__(self) -> int: ...


@dataclass
class Evidence:
    """A capsule's members as a reader handed them over; large ones only by digest.

    `members` are names, without those of as many sources and oracles as `stored` says. `generations` are the manifests
    of the chain by number from 1, each a map of file name to bytes; lists of sources through which a reader went as
    they came are in `source_lists` instead, by number and file name, and of lists of cells only digests in `cells`.
    What is gone through line by line may be in pieces. `sources` are the contents that are there; where
    lists were gone through, without as many as `matched` says, which the lists name, and `frozen` are those that they
    name and that are not there. `attempt_files` are the digests of every attempt's files; `table` the rows of the
    packed table, or the words for why it cannot be read, and `telemetry_table` likewise.
    `later` are members of a newer minor version of the format, which are listed and hashed and not looked at.
    """

    container_findings: list[str] = field(default_factory=list)
    member_findings: list[str] = field(default_factory=list)
    members: set[str] = field(default_factory=set)
    stored: int = 0
    later: list[str] = field(default_factory=list)
    generations: dict[int, dict[str, bytes]] = field(default_factory=dict)
    source_lists: dict[int, dict[str, SourceList]] = field(default_factory=dict)
    cells: dict[int, ListDigest] = field(default_factory=dict)
    ledger: Content = b""
    head: bytes = b""
    attempt_files: Mapping[str, Mapping[str, FileDigest]] = field(default_factory=dict)
    journals: dict[str, Content] = field(default_factory=dict)
    provenance: dict[str, Content] = field(default_factory=dict)
    telemetry: dict[str, Content] = field(default_factory=dict)
    frozen: set[str] | Digests = field(default_factory=set)
    matched: int = 0
    sources: set[str] | Digests = field(default_factory=set)
    table: Rows | str = ""
    telemetry_table: Rows | str = ()
    results: Content = b""
    identity: str | None = None

    def add_list(self, number: int, name: str, listed: SourceList) -> None:
        """Take in a list of sources through which a reader went; no source has come yet."""
        self.source_lists.setdefault(number, {})[name] = listed
        contents, listed.contents = listed.contents, Digests()
        if not len(self.frozen):
            self.frozen = contents
            return
        for digest in contents:
            self.frozen.add(digest)

    def add_source(self, digest: str) -> None:
        """Take in a source that is there, after the lists."""
        if digest in self.frozen:
            self.frozen.discard(digest)
            self.matched += 1
        else:
            self.sources.add(digest)

    def files(self, number: int) -> set[str]:
        """The names of the files of a manifest."""
        cells = {CELLS} if number in self.cells else set()
        return {*self.generations.get(number, ()), *self.source_lists.get(number, ()), *cells}

    def list_digests(self, number: int) -> dict[str, ListDigest]:
        """Count and digest of every list of a manifest, by file name."""
        found = {name: list_digest(data) for name, data in self.generations[number].items() if name.endswith(".jsonl")}
        found |= {name: listed.digest for name, listed in self.source_lists.get(number, {}).items()}
        return found | ({CELLS: self.cells[number]} if number in self.cells else {})


@dataclass
class Reading:
    """What the checks have understood so far; a later check uses what an earlier one could read."""

    evidence: Evidence
    against: tuple[str, ...] = ()
    trust: Trust = field(default_factory=Trust)
    manifests: list[Manifest] = field(default_factory=list)
    cells: Sequence[Cell] = ()
    sources: dict[str | None, SourceList] = field(default_factory=dict)
    ledger: LedgerPass = field(default_factory=LedgerPass)
    journals: dict[str, Journal] = field(default_factory=dict)
    results: Results | None = None
    signatures: list[SignatureFound] = field(default_factory=list)
    tokens: list[TokenFound] = field(default_factory=list)
    token_faults: list[str] = field(default_factory=list)

    @property
    def chain(self) -> Walk:
        """The way through the ledger's lines."""
        return self.ledger.walk

    @property
    def account(self) -> Account:
        """The ledger added up."""
        return self.ledger.account

    @property
    def manifest(self) -> Manifest | None:
        """The manifest in force: the last of the chain."""
        return self.manifests[-1] if self.manifests else None


class NotChecked(Exception):
    """A check cannot be made; `required` says whether that leaves the capsule incomplete."""

    def __init__(self, words: str, *, required: bool = True) -> None:
        super().__init__(words)
        self.required = required
