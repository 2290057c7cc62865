"""Timestamp: let an authority say when a manifest existed. The only step that uses the network, and only if asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capsule.core.digest import hex_of
from capsule.core.errors import BrokenError, FrozenError, MachineError, RefusedError, UsageError
from capsule.core.sshsig import JUDGED_MAX
from capsule.core.tokens import SIZE_MAX, Token, as_reply, read_token
from capsule.host import tsa
from capsule.host.durable import read_regular, write_durably, write_output
from capsule.host.workspace import Generation, find_workspace

TOKEN = "manifest.json.tsr"


@dataclass(frozen=True)
class Stamped:
    """A token beside a manifest, or the query for one (then `token` is nothing)."""

    manifest: str
    path: Path
    token: Token | None
    written: bool


def timestamp(
    protocol: Path, *, url: str | None = None, query: Path | None = None, token: Path | None = None
) -> Stamped:
    """Get a token for the manifest in force from an authority or a file, or write the query for one.

    Raises:
        UsageError: not exactly one of the three was asked for, or there is no such file.
        IncompleteError: nothing is frozen.
        MachineError: the authority or openssl failed.
        MalformedError: the reply is no granted token.
        BrokenError: the token is over something else.
        FrozenError: another token is there already.
        RefusedError: the manifests before have as many tokens as a capsule may come with.
    """
    if sum(choice is not None for choice in (url, query, token)) != 1:
        raise UsageError(
            "expected exactly one of --url, --query and --token",
            hint="--url asks an authority over the network; --query OUT and --token FILE do without",
        )
    chain = find_workspace(protocol).chain()
    generation = chain[-1]
    stamped = sum(TOKEN in each.files for each in chain[:-1])
    if stamped >= JUDGED_MAX:
        raise RefusedError(
            f"expected fewer than {JUDGED_MAX} tokens of all manifests of a protocol, found {stamped}",
            hint=f"`capsule verify` judges at most {JUDGED_MAX} and calls a capsule with more broken",
        )
    identity = generation.manifest.identity
    if query is not None:
        return _query(identity, query)
    if url is not None:
        data = tsa.post(url, tsa.query(hex_of(identity)))
        where = url
    else:
        assert token is not None
        data, where = _file(token), str(token)
    return _store(generation, as_reply(data), where)


def _query(identity: str, path: Path) -> Stamped:
    try:
        write_output(path, tsa.query(hex_of(identity)))
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from error
    return Stamped(identity, path, None, True)


def _file(path: Path) -> bytes:
    data = read_regular(path.resolve(), SIZE_MAX + 1)
    if data is None:
        raise UsageError(f"expected a token at {path}, found no file that can be read")
    return data


def _store(generation: Generation, data: bytes, where: str) -> Stamped:
    identity = generation.manifest.identity
    found = read_token(data, where)
    if found.imprint != identity:
        raise BrokenError(f"{where}: expected a token over {identity}, found one over {found.imprint}")
    path = generation.directory / TOKEN
    there = generation.files.get(TOKEN)
    if there is not None and there != data:
        raise FrozenError(
            f"expected no token beside the manifest, found another one at {path}",
            hint="a manifest has one token; the earliest says most",
        )
    if there is None:
        try:
            write_durably(path, data, mode=0o444)
        except OSError as error:
            raise MachineError(f"cannot write {path}: {error.strerror}") from error
    return Stamped(identity, path, found, there is None)
