"""What signatures and tokens do to a verdict, by real keys and a real authority: S-01 to S-13."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from builders import History, edited, generation, honest, manifest_of, rechained, sealed, with_ledger

from capsule.archive.readme import verify_text
from capsule.cli.signed import signatures
from capsule.core.evidence import Evidence
from capsule.core.judge import judge
from capsule.core.rests import GROUNDS
from capsule.core.signing import Demand, SignatureAnswer, SignatureFound, Trust
from capsule.core.sshsig import archive_message
from capsule.core.verdict import Check, Verdict
from capsule.host import ssh, tsa
from tests.signatures import Authority, Key, call, policy_time

DOCS = Path(__file__).parents[2] / "docs"
HONEST = honest().evidence()
MANIFEST = generation()["manifest.json"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys and two authorities."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        Key.make(folder / name)
    for name in ("tsa", "other"):
        Authority.make(folder / name)
    return folder


@pytest.fixture(scope="module")
def alice(home: Path) -> Key:
    return Key(home / "alice")


@pytest.fixture(scope="module")
def token(home: Path) -> bytes:
    """A token over the manifest, of a second ago."""
    made = Authority(home / "tsa").stamp(MANIFEST)
    time.sleep(1.1)
    return made


def with_files(**files: bytes) -> Evidence:
    """The honest evidence with files beside its manifest: sig, sig2 and tsr."""
    names = {"sig": "manifest.json.sig", "sig2": "manifest.json.2.sig", "tsr": "manifest.json.tsr"}
    evidence = deepcopy(HONEST)
    evidence.generations[1] |= {names[key]: data for key, data in files.items()}
    return sealed(evidence)


def by(
    policy: str | None = None, *, demand: Demand | None = "any", ca: Path | None = None, capsule: bytes = b""
) -> Trust:
    """Judge by a policy; a demand goes with it."""
    return Trust(
        signatures=(("study.capsule.sig", capsule),) if capsule else (),
        demand=demand if policy is not None else None,
        check_signature=ssh.checker(policy.encode() if policy is not None else None),
        check_token=tsa.checker(ca.read_bytes()) if ca else None,
    )


def check(verdict: Verdict, identifier: str) -> Check:
    return next(item for item in verdict.checks if item.id == identifier)


def only(verdict: Verdict) -> SignatureFound:
    (found,) = verdict.signatures
    return found


def claims(verdict: Verdict) -> list[tuple[str, int | None, str | None, str, bool, bool]]:
    return [(c.event, c.manifest, c.after, c.evidence, c.proven, c.late) for c in verdict.order]


def test_a_trusted_signature_of_the_manifest(alice: Key) -> None:
    """S-01 S-06 S-07: accepted by a policy; a good one by an unknown key without; unchecked where nobody can say."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"))
    verdict = judge(evidence, trust=by(alice.allowed()))
    assert (verdict.integrity, check(verdict, "V-08").status) == ("intact", "passed")
    found = only(verdict)
    assert (found.answer, found.principals, found.manifest, found.judged_at) == (
        "accepted",
        ("alice@example.org",),
        1,
        None,
    )
    assert "the capsule itself is unsigned" in check(verdict, "V-08").words
    for trust, answer in ((by(), "unknown"), (Trust(), "unchecked")):
        verdict = judge(evidence, trust=trust)
        assert (verdict.integrity, verdict.signed, check(verdict, "V-08").status) == ("intact", True, "not_checked")
        assert only(verdict).answer == answer


def test_a_trusted_signature_of_the_capsule(alice: Key) -> None:
    """S-02: it is over the identity and a newline, in another namespace than a manifest's."""
    assert HONEST.identity
    message = archive_message(HONEST.identity)
    good = alice.sign(message, "capsule-archive")
    verdict = judge(deepcopy(HONEST), trust=by(alice.allowed(), demand="capsule", capsule=good))
    assert (verdict.integrity, only(verdict).manifest) == ("intact", None)
    for wrong in (
        alice.sign(message, "capsule-manifest"),
        alice.sign(message.strip(), "capsule-archive"),
        alice.sign(archive_message("sha256:" + "0" * 64), "capsule-archive"),
        b"no signature",
    ):
        verdict = judge(deepcopy(HONEST), trust=by(alice.allowed(), demand="capsule", capsule=wrong))
        assert (verdict.integrity, check(verdict, "V-08").status) == ("broken", "failed")


POLICIES: dict[str, tuple[Callable[[Key], str], str, str]] = {
    "expired": (
        lambda key: key.allowed(options='valid-before="20200101Z"'), "not_valid",
        "expired by your policy at 20",
    ),
    "not yet valid": (
        lambda key: key.allowed(options='valid-after="20990101Z"'), "not_valid",
        "not yet valid by your policy at 20",
    ),
    "namespace": (
        lambda key: key.allowed(options='namespaces="git"'), "not_permitted",
        "not allowed to sign capsule-manifest by your policy",
    ),
    "namespace of capsules": (
        lambda key: key.allowed(options='namespaces="capsule-archive"'), "not_permitted",
        "not allowed to sign capsule-manifest by your policy",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "answer", "words"), POLICIES.values(), ids=POLICIES)
def test_keys_that_do_not_count(alice: Key, policy: Callable[[Key], str], answer: str, words: str) -> None:
    """S-07: a key outside its time, or for another purpose, is named so, and what was demanded is not there."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"))
    verdict = judge(evidence, trust=by(policy(alice)))
    assert (verdict.integrity, verdict.outcome, only(verdict).answer) == ("incomplete", "withheld", answer)
    assert words in check(verdict, "V-08").words
    assert check(verdict, "V-08").words.startswith(
        "expected a signature of the capsule or its manifest by a trusted key"
    )
    accepted = judge(evidence, trust=by(policy(alice) + alice.allowed("again@example.org")))
    assert (accepted.integrity, only(accepted).principals) == ("intact", ("again@example.org",))


def test_names_of_a_policy(alice: Key) -> None:
    """S-07: every name of every line with the key counts, quoted ones and patterns too; other lines do not matter."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"))
    policy = (
        f"# {alice.public}\nbob@example.org ssh-ed25519 AAAA\n"
        + alice.allowed("carol@example.org", 'namespaces="git"')
        + alice.allowed("expired@example.org", 'valid-before="20200101Z"')
        + alice.allowed('"*@other.org,!dave@other.org"', 'namespaces="capsule-*"')
        + "\t" + alice.allowed("erin@example.org").replace(" ", "\t")
    )  # fmt: skip
    policy += "nul\0@example.org " + alice.public + "\n"
    assert only(judge(evidence, trust=by(policy))).principals == ("*@other.org", "erin@example.org")


@pytest.mark.parametrize(("patterns", "shown"), [("*", "'*'"), ('"*,a?c@*"', "'*' or 'a?c@*'")])
def test_a_pattern_is_nobodys_name(alice: Key, patterns: str, shown: str) -> None:
    """S-07: where the policy has a pattern in the place of a name, the key and the pattern are told, and no name is."""
    verdict = judge(with_files(sig=alice.sign(MANIFEST, "capsule-manifest")), trust=by(alice.allowed(patterns)))
    said = f"manifest 1 signed by key {only(verdict).key}, which your policy takes for whoever matches {shown}"
    assert check(verdict, "V-08").words.startswith(f"{said}, valid now")
    assert signatures(verdict).startswith(said)
    named = judge(
        with_files(sig=alice.sign(MANIFEST, "capsule-manifest")),
        trust=by(alice.allowed(patterns) + alice.allowed("alice@example.org")),
    )
    assert signatures(named).startswith("manifest 1 signed by alice@example.org,")


@pytest.mark.parametrize("options", ["cert-authority", 'unheard-of="x"', 'namespaces="', 'valid-before="soon"'])
def test_lines_that_accept_no_key(alice: Key, options: str) -> None:
    """S-07: a line for certificates only, and one that ssh-keygen cannot read, accept nobody; nothing else breaks."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"))
    verdict = judge(evidence, trust=by(alice.allowed(options=options)))
    assert (verdict.integrity, only(verdict).answer, only(verdict).principals) == ("incomplete", "unknown", ())
    assert "in your policy, and not accepted by it" in check(verdict, "V-08").words
    assert judge(evidence, trust=by(alice.allowed(options=options) + alice.allowed())).integrity == "intact"


def test_a_key_that_the_policy_does_not_have(home: Path, alice: Key) -> None:
    """S-07: unknown to you; the capsule lacks what was demanded, and is not broken."""
    evidence = with_files(sig=Key(home / "mallory").sign(MANIFEST, "capsule-manifest"))
    verdict = judge(evidence, trust=by(alice.allowed()))
    assert (verdict.integrity, only(verdict).answer, only(verdict).words) == ("incomplete", "unknown", "unknown to you")


def test_a_signature_of_something_else_breaks(alice: Key) -> None:
    """S-06: whether or not anything is demanded."""
    evidence = with_files(sig=alice.sign(MANIFEST + b"\n", "capsule-manifest"))
    for trust in (by(), by(alice.allowed())):
        verdict = judge(evidence, trust=trust)
        assert (verdict.integrity, verdict.signed, only(verdict).answer) == ("broken", False, "broken")
        assert not any(claim.event == "signature" for claim in verdict.order)


def test_without_ssh_keygen_nothing_is_claimed(alice: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-06: unchecked; what was demanded is incomplete."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert judge(evidence, trust=by()).integrity == "intact"
    verdict = judge(evidence, trust=by(alice.allowed()))
    assert (verdict.integrity, only(verdict).answer) == ("incomplete", "unchecked")
    assert "ssh-keygen is not on this machine" in check(verdict, "V-08").words


def test_tools_that_cannot_be_run(
    home: Path, alice: Key, token: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-06 S-10: as if they were not there; what was demanded is incomplete, and says why."""
    signature = alice.sign(MANIFEST, "capsule-manifest")
    for name in ("ssh-keygen", "openssl"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    evidence = with_files(sig=signature, tsr=token)
    verdict = judge(evidence, trust=by("a@example.org ssh-ed25519 AAAA", ca=Authority(home / "tsa").certificate))
    assert verdict.integrity == "incomplete"
    assert "cannot run ssh-keygen: Permission denied" in check(verdict, "V-08").words
    assert "cannot run openssl: Permission denied" in check(verdict, "V-09").words


def test_demands(home: Path, alice: Key) -> None:
    """V-08 S-07: of the capsule, of the manifest in force, of both, or of any of the two."""
    assert HONEST.identity
    signed = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"))
    assert signed.identity
    of_capsule = alice.sign(archive_message(signed.identity), "capsule-archive")
    unsigned = alice.sign(archive_message(HONEST.identity), "capsule-archive")
    met: dict[Demand, tuple[bool, bool, bool]] = {
        "any": (True, True, True), "capsule": (False, True, True), "manifest": (True, False, True),
        "both": (False, False, True),
    }  # fmt: skip
    for demand, wanted in met.items():
        found = (
            judge(deepcopy(signed), trust=by(alice.allowed(), demand=demand)),
            judge(deepcopy(HONEST), trust=by(alice.allowed(), demand=demand, capsule=unsigned)),
            judge(deepcopy(signed), trust=by(alice.allowed(), demand=demand, capsule=of_capsule)),
        )
        assert tuple(verdict.integrity == "intact" for verdict in found) == wanted, demand


def test_several_signatures(home: Path, alice: Key) -> None:
    """S-01: each is judged alone; one broken one breaks, one unknown one does not."""
    good, other = alice.sign(MANIFEST, "capsule-manifest"), Key(home / "mallory").sign(MANIFEST, "capsule-manifest")
    verdict = judge(with_files(sig=other, sig2=good), trust=by(alice.allowed()))
    assert (verdict.integrity, [found.answer for found in verdict.signatures]) == ("intact", ["unknown", "accepted"])
    assert judge(with_files(sig=good, sig2=b"x"), trust=by(alice.allowed())).integrity == "broken"


def test_no_more_than_a_hundred_are_judged(alice: Key, token: bytes) -> None:
    """S-01: each costs a program's run, so a capsule of many is broken without as many runs."""
    signature, evidence, runs = alice.sign(MANIFEST, "capsule-manifest"), deepcopy(HONEST), []

    def counted(message: bytes, data: bytes, namespace: str, at: str | None) -> SignatureAnswer:
        runs.append(message)
        return SignatureAnswer("unknown", "unknown to you")

    for number in range(1, 102):
        evidence.generations.setdefault(number, {}).update({"manifest.json.sig": signature, "manifest.json.tsr": token})
    verdict = judge(sealed(evidence), trust=Trust(check_signature=counted))
    assert verdict.integrity == "broken"
    assert "expected at most 100 signatures, found 101" in check(verdict, "V-08").findings
    assert "expected at most 100 tokens, found 101" in check(verdict, "V-09").findings
    assert len(runs) == 100


def test_a_key_is_judged_at_the_time_of_the_token(home: Path, alice: Key, token: bytes) -> None:
    """S-07: a key that expired after the token's time counts; one that came after it counts now."""
    signature = alice.sign(MANIFEST, "capsule-manifest")
    ca = Authority(home / "tsa").certificate
    expired = alice.allowed(options=f'valid-before="{policy_time(-1)}"')
    begun = alice.allowed(options=f'valid-after="{policy_time()}"')
    stamped = judge(with_files(sig=signature, tsr=token), trust=by(expired, ca=ca))
    assert (stamped.integrity, only(stamped).answer) == ("intact", "accepted")
    assert only(stamped).judged_at == stamped.tokens[0].time
    assert "the token's time" in check(stamped, "V-08").words
    assert judge(with_files(sig=signature), trust=by(expired)).integrity == "incomplete"
    assert judge(with_files(sig=signature, tsr=token), trust=by(expired)).integrity == "incomplete", "unverified token"
    later = judge(with_files(sig=signature, tsr=token), trust=by(begun, ca=ca))
    assert (later.integrity, only(later).judged_at) == ("intact", None)


def test_tokens(home: Path, token: bytes) -> None:
    """S-10 V-09: verified by its authority, foreign by another, unverified without, and broken when changed."""
    ca, other = Authority(home / "tsa").certificate, Authority(home / "other").certificate
    verified = judge(with_files(tsr=token), trust=by(ca=ca))
    assert (verified.integrity, check(verified, "V-09").status) == ("intact", "passed")
    assert verified.tokens[0].answer == "verified"
    foreign = judge(with_files(tsr=token), trust=by(ca=other))
    assert (foreign.integrity, foreign.tokens[0].answer) == ("incomplete", "foreign")
    unverified = judge(with_files(tsr=token))
    assert (unverified.integrity, unverified.tokens[0].answer) == ("intact", "unchecked")
    assert judge(deepcopy(HONEST), trust=by(ca=ca)).integrity == "incomplete"
    forged = bytearray(token)
    forged[-1] ^= 1
    broken = judge(with_files(tsr=bytes(forged)), trust=by(ca=ca))
    assert (broken.integrity, broken.tokens[0].answer) == ("broken", "broken")
    assert judge(with_files(tsr=b"\x30\0"), trust=by(ca=ca)).integrity == "broken"
    assert judge(with_files(tsr=Authority(home / "tsa").stamp(b"other"))).integrity == "broken", "over something else"


def test_an_authority_that_has_expired(tmp_path: Path) -> None:
    """S-10: judged now, so a token outlives its authority's certificate only as its own word."""
    authority = Authority.make(tmp_path / "tsa", days=0)
    stamped = authority.stamp(MANIFEST)
    time.sleep(1.1)
    verdict = judge(with_files(tsr=stamped), trust=by(ca=authority.certificate))
    assert (verdict.integrity, verdict.tokens[0].answer) == ("incomplete", "foreign")
    assert "certificate has expired" in check(verdict, "V-09").words


def test_without_openssl_nothing_is_claimed(home: Path, token: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-10: unchecked, and a verified one was demanded."""
    trust = by(ca=Authority(home / "tsa").certificate)
    monkeypatch.setenv("PATH", "/nonexistent")
    verdict = judge(with_files(tsr=token), trust=trust)
    assert (verdict.integrity, verdict.tokens[0].answer) == ("incomplete", "unchecked")
    assert "openssl is not on this machine" in check(verdict, "V-09").words


def test_order_without_a_token() -> None:
    """S-11: a freeze by a local clock is unproven, the order of freeze and first attempt is the chain's."""
    verdict = judge(deepcopy(HONEST))
    assert claims(verdict) == [
        ("freeze", 1, None, "local clock only", False, False),
        ("first attempt", 1, "freeze 1", "ledger chain", True, False),
    ]
    first = verdict.order[1]
    assert first.words.startswith("a000002 is event "), "a pilot is no first attempt"


def test_order_with_everything(home: Path, alice: Key, token: bytes) -> None:
    """S-11: a verified token proves the freeze; what only local clocks say stays unproven."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"), tsr=token)
    assert evidence.identity
    capsule = alice.sign(archive_message(evidence.identity), "capsule-archive")
    trust = by(alice.allowed(), ca=Authority(home / "tsa").certificate, capsule=capsule)
    assert claims(judge(evidence, trust=trust)) == [
        ("freeze", 1, None, "signed token", True, False),
        ("signature", 1, None, "none", False, False),
        ("timestamp", 1, None, "signed token", True, False),
        ("first attempt", 1, "freeze 1", "ledger chain", True, False),
        ("first attempt", 1, "timestamp 1", "local clock only", False, False),
        ("capsule signature", None, None, "none", False, False),
    ]
    unverified = claims(judge(evidence))
    assert ("timestamp", 1, None, "none", False, False) in unverified
    assert not any(proven for event, *_, proven, _ in unverified if event == "freeze")


def test_order_of_a_broken_ledger_is_unproven() -> None:
    """S-11: the chain proves only where it was found right."""
    evidence = deepcopy(HONEST)
    lines = evidence.ledger.splitlines(keepends=True)
    evidence.ledger = b"".join(lines[:-1])
    verdict = judge(sealed(evidence))
    assert verdict.integrity == "broken"
    assert not any(claim.proven for claim in verdict.order)


def test_order_of_an_amendment(home: Path) -> None:
    """S-11: an amendment names the hash of the event after which it came, and its token then covers those events."""
    history = History().opened()
    history.attempt(0)
    seen = len(history.lines)
    history.amended(edited(("numbers = 20", "numbers = 30")))
    for process in range(3):
        history.attempt(process)
    evidence = history.evidence()
    evidence.generations[2]["manifest.json.tsr"] = Authority(home / "tsa").stamp(
        evidence.generations[2]["manifest.json"]
    )
    verdict = judge(sealed(evidence), trust=by(ca=Authority(home / "tsa").certificate))
    assert verdict.integrity == "intact", [c for c in verdict.checks if c.status == "failed"]
    said = claims(verdict)
    assert ("amendment", 2, f"event {seen - 1}", "ledger chain", True, False) in said
    assert ("amendment", 2, None, "signed token", True, False) in said
    assert ("first attempt", 2, "amendment 2", "ledger chain", True, False) in said
    stamped = next(claim for claim in verdict.order if claim.event == "timestamp")
    assert f"the first {seen} events" in stamped.words


def test_a_late_token_is_named(token: bytes) -> None:
    """S-12: a first attempt whose clock is before its manifest's token is named in the order and beside V-09."""

    def years_ago(events: list[dict[str, Any]]) -> None:
        for event in events:
            event["at"]["realtime"] = event["at"]["realtime"].replace("2030", "2020")

    evidence = with_files(tsr=token)
    evidence = with_ledger(evidence, rechained(evidence.ledger, years_ago))
    verdict = judge(evidence)
    assert verdict.integrity == "intact"
    late = [claim for claim in verdict.order if claim.late]
    assert [(claim.event, claim.after, claim.proven) for claim in late] == [("first attempt", "timestamp 1", False)]
    assert "LATER than the first attempt" in check(verdict, "V-09").words
    assert not any(claim.late for claim in judge(with_files(tsr=token)).order)


def test_what_a_verdict_rests_on(home: Path, alice: Key, token: bytes) -> None:
    """S-13: only what was checked and found good; what nothing speaks for from outside says so."""
    evidence = with_files(sig=alice.sign(MANIFEST, "capsule-manifest"), tsr=token)
    assert evidence.identity
    capsule = alice.sign(archive_message(evidence.identity), "capsule-archive")
    ca = Authority(home / "tsa").certificate

    def named(*, against: tuple[str, ...] = (), trust: Trust | None = None) -> list[str]:
        return [item.ground for item in judge(deepcopy(evidence), against=against, trust=trust).rests_on]

    alone = ["ledger chain", "no seal from outside"]
    assert named() == alone
    assert named(trust=by()) == alone, "unknown keys count for nothing"
    assert named(trust=by(alice.allowed())) == ["manifest signature", *alone]
    assert named(trust=by(ca=ca)) == ["timestamp", *alone]
    assert named(against=(manifest_of(generation()).identity,)) == ["manifest identity from elsewhere", *alone]
    assert named(against=(evidence.identity,)) == ["capsule identity from elsewhere", "ledger chain"]
    everything = by(alice.allowed(), capsule=capsule, ca=ca)
    assert named(trust=everything) == ["capsule signature", "manifest signature", "timestamp", "ledger chain"]


def test_threats_and_verify_say_the_same_sentences() -> None:
    """S-13: docs/THREATS.md, VERIFY.md and the verdict take their sentences from one place."""
    threats = (DOCS / "THREATS.md").read_text(encoding="utf-8")
    inside = verify_text(manifest_of(generation()), [generation()]).decode()
    assert "No manifest of this capsule is signed or has a timestamp." in inside
    for ground in GROUNDS:
        block = threats.partition(f"### {ground.ground.capitalize()}\n")[2].partition("\n#")[0]
        assert f"- Proves: {ground.proves}\n" in block, ground.ground
        assert f"- Does not prove: {ground.does_not_prove}\n" in block, ground.ground
        assert f"- **{ground.ground}**. {ground.proves} It does not prove: {ground.does_not_prove}\n" in inside


def test_the_commands_of_the_document(home: Path, alice: Key, tmp_path: Path, token: bytes) -> None:
    """S-01 S-02 S-10: the commands that the document gives make and check what the clauses say."""
    signature = alice.sign(MANIFEST, "capsule-manifest")
    files = {"manifest.json": MANIFEST, "manifest.json.sig": signature, "manifest.json.tsr": token,
             "SIGNERS": alice.allowed().encode(), "CA": Authority(home / "tsa").certificate.read_bytes()}  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    text = (DOCS / "spec" / "signatures.md").read_text(encoding="utf-8")
    lines = [
        line.strip() for line in text.splitlines() if line.startswith(("    ssh-keygen -Y verify", "    openssl ts"))
    ]
    assert len(lines) == 2
    for line in lines:
        call("sh", "-c", line, folder=tmp_path)
    signing = text.partition("    ssh-keygen -Y sign")[2].partition("\n\n")[0]
    assert "| ssh-keygen -Y sign -n capsule-archive" in signing
