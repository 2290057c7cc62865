"""VERIFY.md inside a capsule: exactly its commands, with stock tools only, give the answer that verify gives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Capsule
from tests.golden.make import seal, unpack
from tests.signatures import Key

TOOLS = ("bash", "zstd", "tar", "sha256sum", "ssh-keygen", "openssl", "mkdir", "grep", "sed")


def blocks(text: str) -> list[str]:
    """Return the blocks of commands, those of the tool itself left out."""
    found = ["\n".join(line[4:] for line in block.splitlines()) for block in re.findall(r"(?:^    .*\n)+", text, re.M)]
    assert len(found) == len(set(found))
    return [block for block in found if not block.startswith("capsule ")]


class Stock:
    """Runs blocks one after the other in one shell's folder, with nothing on the path but the stock tools."""

    def __init__(self, folder: Path, names: dict[str, Path | str]) -> None:
        self.names, self.folder = names, folder
        self.tools = folder / "tools"
        self.tools.mkdir()
        for tool in TOOLS:
            (self.tools / tool).symlink_to(str(shutil.which(tool)))

    def run(self, text: str) -> tuple[bool, str]:
        """Whether every command of VERIFY.md succeeds, and what all say."""
        script = "\n".join(blocks(text))
        for name, value in self.names.items():
            script = re.sub(rf"\b{name}\b", str(value), script)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], cwd=self.folder, capture_output=True, text=True,
            env={"PATH": str(self.tools), "HOME": str(self.folder), "LC_ALL": "C"}, check=False,
        )  # fmt: skip
        return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def stock(signed: Path, keys: Path, tmp_path: Path) -> Stock:
    """The signed capsule and its signature in a folder of their own."""
    file = Path(shutil.copy(signed.with_suffix(".capsule"), tmp_path))
    shutil.copy(f"{signed.with_suffix('.capsule')}.sig", tmp_path)
    who = "alice@example.org"
    return Stock(tmp_path, {"FILE": file, "SIGNERS": keys / "signers", "WHO": who, "CA": keys / "tsa" / "ca.pem"})


@pytest.fixture
def text(capsule: Capsule, signed: Path) -> str:
    return capsule("show", signed.with_suffix(".capsule"), "8-README/VERIFY.md").out


def test_an_honest_capsule(capsule: Capsule, signed: Path, stock: Stock, text: str) -> None:
    """All commands succeed, and print the identities that verify prints and the time of the token."""
    found = json.loads(capsule("verify", signed.with_suffix(".capsule"), "--json").out)
    assert found["integrity"] == "intact"
    good, said = stock.run(text)
    assert good, said
    for key in ("manifest", "capsule"):
        assert found[key].removeprefix("sha256:") in said, key
    assert said.count("Good") == 2
    assert "Verification: OK" in said
    assert "Time stamp: " in said


@pytest.mark.parametrize("place", range(8))
def test_a_damaged_capsule(capsule: Capsule, stock: Stock, text: str, place: int) -> None:
    """One bit flipped anywhere in its frames: verify says broken, and a command fails."""
    file = Path(stock.names["FILE"])
    data = bytearray(file.read_bytes())
    frames = data.rindex(b"capsule-index/")
    data[(2 * place + 1) * frames // 16] ^= 1 << place
    file.write_bytes(data)
    assert capsule("verify", file).code == 1
    good, said = stock.run(text)
    assert not good, said


def test_what_stock_tools_skip(capsule: Capsule, stock: Stock, text: str) -> None:
    """A bit of the index: verify says broken; the text says that stock tools skip it, and so they do."""
    file = Path(stock.names["FILE"])
    data = bytearray(file.read_bytes())
    data[data.rindex(b"capsule-index/") + 20] ^= 1
    file.write_bytes(data)
    assert capsule("verify", file).code == 1
    good, said = stock.run(text)
    assert good, said
    assert "an index and a seek table" in text


@pytest.mark.parametrize("fault", ["cut", "bytes after", "member exchanged", "other signature", "other token"])
def test_other_faults(
    capsule: Capsule, signed: Path, stock: Stock, keys: Path, text: str, fault: str, tmp_path: Path
) -> None:
    """A cut file, foreign bytes, a member exchanged in a sound container, a signature or token of something else."""
    file = Path(stock.names["FILE"])
    data = file.read_bytes()
    members = unpack(data)
    manifest = "1-manifest/001/manifest.json"
    if fault == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif fault == "bytes after":
        file.write_bytes(data + b"more")
    elif fault == "member exchanged":
        file.write_bytes(seal({**members, "3-attempts/a000001/stdout": b"other"}))
    elif fault == "other signature":
        file.write_bytes(seal({**members, manifest + ".sig": Key(keys / "alice").sign(b"other", "capsule-manifest")}))
    else:
        file.write_bytes(seal({**members, manifest + ".tsr": (keys / "tsa" / "reply").read_bytes()[:-9] + bytes(9)}))
    assert capsule("verify", file, "--tsa-ca", keys / "tsa" / "ca.pem").code == 1
    good, said = stock.run(text)
    assert not good, said


def test_an_unsigned_capsule(capsule: Capsule, tmp_path: Path) -> None:
    """Without signatures the commands that check digests succeed, and print the identity."""
    golden = Path(__file__).parents[1] / "golden" / "supported.capsule"
    file = Path(shutil.copy(golden, tmp_path / "study.capsule"))
    text = capsule("show", file, "8-README/VERIFY.md").out
    (tmp_path / "stock").mkdir()
    good, said = Stock(tmp_path / "stock", {"FILE": file}).run(text.partition("## Who signed it")[0])
    assert good, said
    assert json.loads(capsule("verify", file, "--json").out)["capsule"].removeprefix("sha256:") in said
