"""Timestamps of RFC 3161 through openssl, and the one place of the product that uses the network."""

from __future__ import annotations

import os
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from capsule.core.errors import MachineError, UsageError
from capsule.core.signing import TokenAnswer, TokenChecker
from capsule.core.tokens import SIZE_MAX

TOOL = "openssl"
SECONDS_MAX = 60
_OF_CERTIFICATES = "certificate verify error"
_OF_SIGNATURES = ("signature failure", "signature mismatch", "digest failure", "message imprint mismatch")


def query(digest_hex: str) -> bytes:
    """Return the query for a token over a SHA-256, which asks for the authority's certificate and has no nonce.

    Without a nonce the query is the same whoever makes it; an older token over the same manifest is as true.

    Raises:
        MachineError: openssl is missing or failed.
    """
    done = _run("-query", "-digest", digest_hex, "-sha256", "-cert", "-no_nonce")
    if done.returncode != 0:
        raise MachineError(f"expected a query from openssl, found: {_last_line(done.stderr)}")
    return done.stdout


def post(url: str, data: bytes) -> bytes:
    """Send a query to an authority and return its reply.

    Raises:
        UsageError: the address is not one of the web.
        MachineError: the authority cannot be reached, or answers with an error or too much.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"expected an address that begins with https:// or http://, found {url!r}")
    headers = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:
            reply: bytes = answer.read(SIZE_MAX + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MachineError(
            f"expected a reply from {url}, found: {reason}", hint="by other means: --query OUT, then --token FILE"
        ) from error
    if len(reply) > SIZE_MAX:
        raise MachineError(f"expected a reply of at most {SIZE_MAX} bytes from {url}, found a longer one")
    return reply


def check_authority(path: Path) -> bytes:
    """Read the certificates of an authority and return their bytes.

    Raises:
        UsageError: there is no such file, or no certificate in it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"expected certificates at {path}, found {(error.strerror or str(error)).lower()}") from error
    if b"-----BEGIN CERTIFICATE-----" not in data and b"-----BEGIN TRUSTED CERTIFICATE-----" not in data:
        raise UsageError(f"expected certificates (PEM) in {path}, found none")
    return data


def checker(authority: bytes) -> TokenChecker:
    """Return a checker that believes tokens which chain to these certificates, now."""

    def check(data: bytes, token: bytes) -> TokenAnswer:
        try:
            with tempfile.TemporaryDirectory(prefix="capsule-token-") as folder:
                files = {"data": data, "token": token, "authority": authority}
                paths = {name: Path(folder, name) for name in files}
                for name, content in files.items():
                    paths[name].write_bytes(content)
                done = _run(
                    "-verify",
                    "-in",
                    str(paths["token"]),
                    "-data",
                    str(paths["data"]),
                    "-CAfile",
                    str(paths["authority"]),
                )
        except MachineError as error:
            return TokenAnswer("unchecked", f"not checked: {error.message}")
        except OSError as error:
            return TokenAnswer("unchecked", f"not checked: cannot run openssl: {error.strerror}")
        return _answer(done)

    return check


def _answer(done: subprocess.CompletedProcess[bytes]) -> TokenAnswer:
    said = done.stderr.decode(errors="replace")
    if done.returncode == 0 and b"Verification: OK" in done.stdout + done.stderr:
        return TokenAnswer("verified", "as the authority signed")
    if _OF_CERTIFICATES in said:
        reason = [*said.partition("Verify error:")[2].splitlines(), "another certificate"][0]
        return TokenAnswer("foreign", f"not verified by the given certificates ({reason})")
    if "Error loading file" in said:
        return TokenAnswer("unchecked", "not checked: openssl cannot read the given certificates")
    known = [words for words in _OF_SIGNATURES if words in said]
    return TokenAnswer("broken", f"that openssl refuses it: {known[0] if known else _last_line(done.stderr)}")


def _run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [TOOL, "ts", *arguments],
            capture_output=True,
            check=False,
            timeout=SECONDS_MAX,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise MachineError("openssl is not on this machine", hint="install openssl 1.1 or newer") from error
    except OSError as error:
        raise MachineError(f"cannot run openssl: {error.strerror}", hint="install openssl 1.1 or newer") from error
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"openssl gave no answer in {SECONDS_MAX} s") from error


def _last_line(said: bytes) -> str:
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
