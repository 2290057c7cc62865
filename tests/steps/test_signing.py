"""Signing and stamping by command line, with real keys, a real agent and a real authority; what verify then says."""

from __future__ import annotations

import errno
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.core.errors import MachineError
from capsule.steps.export import export
from capsule.steps.report import write_report
from capsule.steps.sign import sign
from capsule.steps.timestamp import timestamp
from tests.conftest import Capsule, Said
from tests.signatures import Authority, Key, call
from tests.study import make_study


@pytest.fixture
def frozen(capsule: Capsule, tmp_path: Path) -> Path:
    """A frozen protocol of one's own."""
    protocol = make_study(tmp_path / "study")
    assert capsule("freeze", protocol).code == 0
    return protocol


def copied(protocol: Path, folder: Path, *, signature: bool = True) -> Path:
    """The signed capsule in a folder of its own, with or without its signature."""
    file = protocol.with_suffix(".capsule")
    if signature:
        shutil.copy(f"{file}.sig", folder)
    return Path(shutil.copy(file, folder))


def verdict(said: Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_the_whole_signed_way(capsule: Capsule, signed: Path, keys: Path) -> None:
    """Everything is there: both signatures by a trusted key, the manifest stamped before the first attempt."""
    file = signed.with_suffix(".capsule")
    options = ["--require-signature", keys / "signers", "--signature-of", "both", "--tsa-ca", keys / "tsa" / "ca.pem"]
    said = capsule("verify", file, *options)
    assert said.code == 0, said
    assert "manifest 1 signed by alice@example.org, capsule signed by alice@example.org" in said.out
    found = verdict(capsule("verify", file, *options, "--json"))
    assert {item["status"] for item in found["checks"] if item["id"] in ("V-08", "V-09")} == {"passed"}
    assert [(item["event"], item["proven"]) for item in found["order"] if item["event"] == "freeze"] == [
        ("freeze", True)
    ]
    assert [item["ground"] for item in found["rests_on"]][:3] == [
        "capsule signature",
        "manifest signature",
        "timestamp",
    ]
    piped = subprocess.run(
        [sys.executable, "-m", "capsule", "verify", "-", *options, "--signature", f"{file}.sig", "--json"],
        stdin=file.open("rb"), capture_output=True, check=True,
    )  # fmt: skip
    assert {**json.loads(piped.stdout), "signatures": []} == {**found, "signatures": []}
    second = Path(shutil.copy(f"{file}.sig", f"{file}.2.sig"))
    assert capsule("run", signed).code == 0, "signatures and capsules are no sources"
    second.unlink()


def test_nothing_demanded_nothing_missing(capsule: Capsule, signed: Path, keys: Path, tmp_path: Path) -> None:
    """Whoever trusts no key sees by which keys it is signed; whoever demands what is not there is told what is."""
    file = copied(signed, tmp_path, signature=False)
    said = capsule("verify", file)
    assert said.code == 0
    assert said.out.startswith(
        "integrity: intact, manifest 1 signed by a key that is unknown to you, the capsule itself unsigned\n"
    )
    assert "signed by key SHA256:" in said.out
    for demand in ("capsule", "both"):
        said = capsule("verify", file, "--require-signature", keys / "signers", "--signature-of", demand)
        assert said.code == 3
        assert "the capsule itself is unsigned" in said.out
    assert capsule("verify", file, "--require-signature", keys / "signers").code == 0
    (tmp_path / "others").write_text(Key(keys / "bob").allowed("bob@example.org"))
    said = capsule("verify", file, "--require-signature", tmp_path / "others")
    assert said.code == 3
    assert "expected a signature of the capsule or its manifest by a trusted key, found: manifest 1 signed" in said.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('valid-before="20200101Z"', "expired by your policy at"),
        ('namespaces="git,file"', "not allowed to sign capsule-manifest by your policy"),
    ],
)
def test_keys_that_do_not_count(
    capsule: Capsule, signed: Path, keys: Path, tmp_path: Path, options: str, words: str
) -> None:
    """An expired key and one for another purpose are named in words, and lack what was demanded: exit code 3."""
    (tmp_path / "signers").write_text(Key(keys / "alice").allowed(options=options))
    said = capsule("verify", copied(signed, tmp_path), "--require-signature", tmp_path / "signers")
    assert said.code == 3
    assert words in said.out


def test_a_signature_of_another_capsule_breaks(capsule: Capsule, signed: Path, keys: Path, tmp_path: Path) -> None:
    """Beside a capsule it is looked at without being asked for."""
    file = copied(signed, tmp_path, signature=False)
    other = Key(keys / "alice").sign(b"sha256:" + b"0" * 64 + b"\n", "capsule-archive")
    Path(f"{file}.sig").write_bytes(other)
    said = capsule("verify", file)
    assert said.code == 1
    assert "expected a signature of this capsule by SHA256:" in said.out
    assert capsule("verify", file, "--signature", f"{signed.with_suffix('.capsule')}.sig").code == 0


def test_an_agent_signs(capsule: Capsule, frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that only the agent holds signs by its public half; without the agent that is said."""
    key = Key.make(tmp_path / "key")
    socket = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as agent:
        try:
            while not socket.exists():
                assert agent.poll() is None
            monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
            call("ssh-add", "-q", key.path)
            key.path.unlink()
            said = capsule("sign", frozen, "--key", tmp_path / "key.pub")
            assert said.code == 0, said
        finally:
            agent.terminate()
    data = (frozen.parent / "study.frozen" / "001" / "manifest.json").read_bytes()
    (tmp_path / "signers").write_text(key.allowed("agent@example.org"))
    signature = frozen.parent / "study.frozen" / "001" / "manifest.json.sig"
    call("ssh-keygen", "-Y", "verify", "-f", tmp_path / "signers", "-I", "agent@example.org", "-n", "capsule-manifest",
         "-s", signature, data=data)  # fmt: skip
    signature.unlink()
    said = capsule("sign", frozen, "--key", tmp_path / "key.pub")
    assert said.code == 5
    assert "ssh-add" in said.err
    assert not signature.exists()


def test_keys_that_cannot_sign(capsule: Capsule, frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, none of the usual ones, one with a passphrase and no terminal: said, and nothing is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "never")
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", tmp_path / "locked")
    (tmp_path / "text").write_text("no key")
    for options, code, words in (
        ((), 2, "none of the usual ones"),
        (("--key", tmp_path / "missing"), 2, "expected a key file"),
        (("--key", tmp_path / "text"), 5, "expected a signature by"),
    ):
        said = capsule("sign", frozen, *options)
        assert (said.code, words in said.err) == (code, True), said
    locked = subprocess.run(
        [sys.executable, "-m", "capsule", "sign", frozen, "--key", tmp_path / "locked"], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, start_new_session=True, check=False,
    )  # fmt: skip
    assert locked.returncode == 5
    assert "ssh-add FILE" in locked.stderr
    assert not list((frozen.parent / "study.frozen" / "001").glob("*.sig"))
    Key.make(tmp_path / ".ssh" / "id_ed25519")
    assert capsule("sign", frozen).code == 0, "the usual key"


def test_several_people_sign(capsule: Capsule, frozen: Path, keys: Path, tmp_path: Path) -> None:
    """Each key has a file of its own; again is success and changes nothing; nine are enough."""
    folder = frozen.parent / "study.frozen" / "001"
    assert verdict(capsule("sign", frozen, "--key", keys / "alice", "--json"))["written"] is True
    before = (folder / "manifest.json.sig").read_bytes()
    assert verdict(capsule("sign", frozen, "--key", keys / "alice", "--json"))["written"] is False
    assert (folder / "manifest.json.sig").read_bytes() == before
    for number in range(2, 10):
        said = verdict(capsule("sign", frozen, "--key", Key.make(tmp_path / f"key{number}").path, "--json"))
        assert Path(said["file"]).name == f"manifest.json.{number}.sig"
    said = capsule("sign", frozen, "--key", Key.make(tmp_path / "key10").path)
    assert said.code == 4
    assert "at most 9 signatures" in said.err


def test_as_many_sign_as_verify_judges(capsule: Capsule, frozen: Path, tmp_path: Path) -> None:
    """S-01: the hundredth signature of a protocol's manifests is made, and a further one refused in words."""
    text, folder = frozen.read_text(), frozen.parent / "study.frozen"
    for number in range(1, 12):
        frozen.write_text(text.replace("A small study", f"A small study, {number}"))
        assert capsule("amend", frozen, "--reason", "another title").code == 0
        for name in ("", *(f".{more}" for more in range(2, 10))):
            (folder / f"{number:03d}" / f"manifest.json{name}.sig").write_text("a signature of somebody")
    first, second = Key.make(tmp_path / "first"), Key.make(tmp_path / "second")
    assert capsule("sign", frozen, "--key", first.path).code == 0
    said = capsule("sign", frozen, "--key", second.path, "--json")
    assert (said.code, json.loads(said.out)["error"]["code"]) == (4, "refused")
    assert "expected fewer than 100 signatures of all manifests of a protocol, found 100" in said.err
    assert "judges at most 100" in said.err
    assert not (folder / "012" / "manifest.json.2.sig").exists()
    assert capsule("sign", frozen, "--key", first.path).code == 0, "signed already is success"


def test_a_capsule_with_as_many_is_not_signed(
    capsule: Capsule, signed: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-01: signatures of the manifests inside count with those beside the capsule."""
    file = copied(signed, tmp_path)
    monkeypatch.setattr("capsule.steps.sign.JUDGED_MAX", 2)
    said = capsule("sign", file, "--key", Key.make(tmp_path / "other").path)
    assert said.code == 4
    assert "expected fewer than 2 signatures of a capsule and the manifests in it, found 2" in said.err
    assert not Path(f"{file}.2.sig").exists()


def test_what_nobody_should_vouch_for(capsule: Capsule, signed: Path, keys: Path, tmp_path: Path) -> None:
    """A broken capsule is not signed; a signature by the same key over another one is not replaced."""
    file = copied(signed, tmp_path, signature=False)
    broken = tmp_path / "broken.capsule"
    broken.write_bytes(file.read_bytes() + b"x")
    said = capsule("sign", broken, "--key", keys / "alice")
    assert said.code == 1
    assert "expected an intact capsule to vouch for, found one that is broken" in said.err
    assert not Path(f"{broken}.sig").exists()
    Path(f"{file}.sig").write_bytes(Key(keys / "alice").sign(b"sha256:" + b"0" * 64 + b"\n", "capsule-archive"))
    said = capsule("sign", file, "--key", keys / "alice")
    assert said.code == 4
    assert "over something else" in said.err


class Server(http.server.BaseHTTPRequestHandler):
    """The server of an authority, whose address says how it answers."""

    authority: Authority

    def do_POST(self) -> None:
        query = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/timestamp-query"
        answers = {
            "/tsr": lambda: self.authority.answer(query),
            "/garbage": lambda: b"<html>",
            "/long": lambda: bytes(1 << 20),
            "/other": lambda: self.authority.stamp(b"other"),
        }
        self.send_response(200 if self.path in answers else 500)
        self.end_headers()
        if self.path in answers:
            self.wfile.write(answers[self.path]())

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def address(keys: Path) -> Iterator[str]:
    """The address of an authority's server on this machine."""
    Server.authority = Authority(keys / "tsa")
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_authority_stamps(capsule: Capsule, frozen: Path, keys: Path, address: str) -> None:
    """Over the network: a token is stored once, never replaced; what is no token over this manifest is not."""
    place = frozen.parent / "study.frozen" / "001" / "manifest.json.tsr"
    for path, code, words in (
        ("/garbage", 3, "expected a timestamp reply of RFC 3161"),
        ("/long", 5, "found a longer one"),
        ("/missing", 5, "Internal Server Error"),
        ("/other", 1, "expected a token over sha256:"),
    ):
        said = capsule("timestamp", frozen, "--url", address + path)
        assert (said.code, words in said.err) == (code, True), said
        assert not place.exists()
    assert capsule("timestamp", frozen, "--url", address + "/tsr").code == 0
    call("openssl", "ts", "-verify", "-in", place, "-data", place.with_suffix(""), "-CAfile", keys / "tsa" / "ca.pem")
    before = place.read_bytes()
    said = capsule("timestamp", frozen, "--url", address + "/tsr")
    assert said.code == 4
    assert "a manifest has one token" in said.err
    assert capsule("timestamp", frozen, "--token", place).code == 0, "the same one again"
    assert place.read_bytes() == before


def test_stamps_that_are_refused(capsule: Capsule, frozen: Path, tmp_path: Path) -> None:
    """Not exactly one way, no address of the web, nobody there, no file."""
    for options, code, words in (
        ((), 2, "exactly one of --url, --query and --token"),
        (("--url", "http://x", "--query", tmp_path / "q"), 2, "exactly one of --url, --query and --token"),
        (("--url", "file:///etc/passwd"), 2, "expected an address that begins with https"),
        (("--url", "http://127.0.0.1:1/tsr"), 5, "--query OUT, then --token FILE"),
        (("--token", tmp_path / "missing"), 2, "expected a token at"),
        (("--query", tmp_path / "no" / "q"), 5, "cannot write"),
    ):
        said = capsule("timestamp", frozen, *options)
        assert (said.code, words in said.err) == (code, True), said


def test_a_manifest_stamped_after_the_first_attempt_is_named_as_such(
    capsule: Capsule, frozen: Path, keys: Path, tmp_path: Path
) -> None:
    """Intact, and said in words and in the object; so is that attempts came before a signature."""
    assert capsule("run", frozen).code == 0
    said = capsule("sign", frozen, "--key", keys / "alice")
    assert "2 attempts under it came before this signature" in said.out
    token = tmp_path / "token"
    time.sleep(1)  # tokens tell whole seconds
    token.write_bytes(Authority(keys / "tsa").stamp((frozen.parent / "study.frozen/001/manifest.json").read_bytes()))
    assert capsule("timestamp", frozen, "--token", token).code == 0
    assert capsule("pack", frozen).code == 0
    file = frozen.with_suffix(".capsule")
    said = capsule("verify", file, "--tsa-ca", keys / "tsa" / "ca.pem")
    assert said.code == 0
    assert "the token is LATER than the first attempt" in said.out
    found = verdict(capsule("verify", file, "--json"))
    assert [item["after"] for item in found["order"] if item["late"]] == ["timestamp 1"]


def test_what_verify_is_given(capsule: Capsule, signed: Path, keys: Path, tmp_path: Path) -> None:
    """Files that are not there or not what they should be are errors of usage, and say which file."""
    file = copied(signed, tmp_path)
    (tmp_path / "text").write_text("# nothing\n")
    for options, words in (
        (("--require-signature", tmp_path / "missing"), "expected a file of allowed signers at"),
        (("--require-signature", tmp_path / "text"), "expected lines of `NAME KEYTYPE KEY`"),
        (("--require-signature", keys / "signers", "--signature-of", "all"), "expected one of any, capsule"),
        (("--signature-of", "capsule"), "expected --require-signature"),
        (("--signature", tmp_path / "missing"), "expected a signature at"),
        (("--tsa-ca", tmp_path / "missing"), "expected certificates at"),
        (("--tsa-ca", tmp_path / "text"), "expected certificates (PEM) in"),
    ):
        said = capsule("verify", file, *options)
        assert (said.code, words in said.err) == (2, True), said


def test_a_full_disk_leaves_no_half_of_a_file(signed: Path, keys: Path, tmp_path: Path, frozen: Path) -> None:
    """Half a signature beside a manifest would make an honest capsule a broken one."""
    file = copied(signed, tmp_path, signature=False)

    def half(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def there() -> dict[Path, int]:
        return {path: path.stat().st_size for path in tmp_path.rglob("*") if path.suffix != ".lock"}

    before = there()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("capsule.host.durable.write", half)
        for refused in (
            lambda: sign(frozen, keys / "alice"),
            lambda: sign(file, keys / "alice"),
            lambda: timestamp(frozen, query=tmp_path / "query"),
            lambda: export(file, "in-toto", tmp_path / "statement.json"),
            lambda: write_report(file, tmp_path / "report.html"),
        ):
            with pytest.raises(MachineError, match="No space left"):
                refused()
    assert there() == before
