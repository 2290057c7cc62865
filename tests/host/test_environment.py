"""The environment: described without telling whose machine it is, compared with RECORD and with what was required."""

from __future__ import annotations

import base64
import getpass
import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capsule.core.canonical import canonical, parse
from capsule.core.digest import digest_of
from capsule.core.manifest import FileDigest
from capsule.core.protocol import Environment
from capsule.host import environment
from capsule.host.environment import (
    check_required,
    check_specifiers,
    find_environment,
    variables_present,
    variables_shown,
)


def clear() -> None:
    environment.installed.cache_clear()
    environment._distributions.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of distributions, the only one on the path where they are looked for."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    clear()
    yield folder
    clear()


def install(site: Path, name: str, files: dict[str, bytes], *, version: str = "1.0", editable: bool = False) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{info.name}/RECORD,,"]
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f'"{path}",,' if path.endswith(".pyc") else f'"{path}",sha256={encoded},{len(data)}')
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    if editable:
        described = {"url": "file:///home/somebody/project", "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(described))


def described(name: str) -> dict[str, Any]:
    clear()
    return next(item for item in find_environment()["distributions"] if item["name"] == name)


def test_the_description_is_canonical_json_of_this_interpreter() -> None:
    found = find_environment()
    assert parse(canonical(found), "environment") == found
    assert found["interpreter"]["version"] == platform.python_version()
    assert found["platform"]["processors"] == os.cpu_count()
    versions = {item["name"]: item["version"] for item in found["distributions"]}
    assert versions["pytest"] == pytest.__version__
    assert "SHA-256 of every .py" in found["checked"]


def test_the_description_tells_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/home/somebody/lib")
    monkeypatch.setenv("OMP_NUM_THREADS", "/home/somebody/oops")
    monkeypatch.setenv("HF_TOKEN", "not-to-be-seen")
    text = canonical(find_environment()).decode()
    for private in (str(Path.home()), sys.prefix, sys.base_prefix, socket.gethostname(), "somebody", "not-to-be-seen"):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text
    assert '"/' not in text


def test_an_untouched_distribution_matches_its_record(site: Path) -> None:
    install(site, "demo", {"demo/__init__.py": b"X = 1\n", "demo/lib.so": b"\x7fELF", "demo/a, b.txt": b"x"})
    assert described("demo") == {
        "name": "demo", "version": "1.0", "editable": False, "files": 4, "changed": [], "missing": [],
        "unhashed_pyc": [],
    }  # fmt: skip


def test_changed_and_missing_files_are_named(site: Path) -> None:
    install(site, "demo", {"demo/a.py": b"X = 1\n", "demo/b.so": b"\x7fELF", "demo/c.py": b"", "demo/d.txt": b"x"})
    (site / "demo" / "a.py").write_bytes(b"X = 2\n")
    (site / "demo" / "b.so").write_bytes(b"\x7fELF longer")
    (site / "demo" / "c.py").unlink()
    (site / "demo" / "d.txt").write_bytes(b"y")
    found = described("demo")
    assert found["changed"] == ["demo/a.py", "demo/b.so"]
    assert found["missing"] == ["demo/c.py"]


def test_many_changed_files_are_counted(site: Path) -> None:
    install(site, "demo", {f"demo/m{number:03d}.py": b"x" for number in range(70)})
    for path in (site / "demo").iterdir():
        path.write_bytes(b"")
    changed = described("demo")["changed"]
    assert len(changed) == 51
    assert changed[-1] == "and 20 more"


def test_bytecode_that_runs_unlooked_at_is_named(site: Path) -> None:
    magic = b"\xa7\r\r\n"
    install(
        site,
        "demo",
        {
            "demo/__pycache__/timed.cpython-311.pyc": magic + bytes(12),
            "demo/__pycache__/checked.cpython-311.pyc": magic + b"\3\0\0\0" + bytes(8),
            "demo/__pycache__/unchecked.cpython-311.pyc": magic + b"\1\0\0\0" + bytes(8),
            "demo/sourceless.pyc": magic + bytes(12),
        },
    )
    assert described("demo")["unhashed_pyc"] == ["demo/__pycache__/unchecked.cpython-311.pyc", "demo/sourceless.pyc"]


def test_an_editable_distribution_is_named_without_its_place(site: Path) -> None:
    install(site, "demo", {}, editable=True)
    assert described("demo")["editable"] is True
    assert "project" not in canonical(find_environment()).decode()


def test_damaged_metadata_is_no_failure(site: Path) -> None:
    install(site, "demo", {"demo.py": b""})
    (site / "demo-1.0.dist-info" / "direct_url.json").write_text("{")
    (site / "demo-1.0.dist-info" / "RECORD").write_text('demo.py\n"",,\n/usr/lib/x.py,sha256=zz,3\n')
    assert described("demo")["missing"] == ["x.py"]


def test_the_first_on_the_path_is_what_counts(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "demo", {}, version="1.0")
    (tmp_path / "later").mkdir()
    install(tmp_path / "later", "Demo", {}, version="2.0")
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "later")])
    clear()
    assert [i["version"] for i in find_environment()["distributions"] if i["name"].lower() == "demo"] == ["1.0"]


def test_startup_files_are_named_with_digests(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "evil.pth").write_bytes(b"import os\n")
    (site / "sitecustomize.py").write_bytes(b"X = 1\n")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site)])
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    startup = find_environment()["startup"]
    assert {"name": "evil.pth", "sha256": digest_of(b"import os\n")} in startup
    assert {"name": "sitecustomize.py", "sha256": digest_of(b"X = 1\n")} in startup


def test_variables_by_value_by_name_or_not_at_all() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "GPU-1,0", "TZ": "Europe/Paris", "OMP_NUM_THREADS": "4", "LANG": "C.UTF-8",
        "LD_PRELOAD": "/x.so", "PYTHONPATH": "/home/me", "HF_TOKEN": "t", "HOME": "/home/me", "AWS_SECRET": "s",
        "LDAP": "x", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    assert variables_shown(environ) == {
        "CUDA_VISIBLE_DEVICES": "GPU-1,0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "4", "TZ": "Europe/Paris",
    }  # fmt: skip
    assert variables_present(environ) == ["HF_TOKEN", "LD_PRELOAD", "NCCL_DEBUG", "PYTHONPATH"]


def required(**changes: Any) -> Environment:
    return Environment(**{"python": ">=3.11", **changes})


def found(version: str = "3.12.1", **packages: str) -> dict[str, Any]:
    distributions = [{"name": name, "version": number} for name, number in packages.items()]
    return {"interpreter": {"version": version}, "distributions": distributions}


@pytest.mark.parametrize(
    ("environment", "there", "words"),
    [
        (required(), found(), []),
        (required(python=">=3.11,<3.12"), found(), ["python: expected >=3.11,<3.12, found 3.12.1"]),
        (required(packages={"torch": "==2.13.0"}), found(torch="2.13.0+cpu"), []),
        (required(packages={"torch": ">=2.11"}), found(torch="2.12.0rc1"), []),
        (required(packages={"Tokens_X": ">=1"}), found(**{"tokens.x": "1.2"}), []),
        (required(packages={"torch": "==2.13.0"}), found(torch="2.12.0"), ["torch: expected ==2.13.0, found 2.12.0"]),
        (required(packages={"torch": ""}), found(), ["torch: expected any version, found none"]),
        (required(packages={"torch": ""}), found(torch="not a version"), []),
        (required(packages={"torch": ">=1"}), found(torch="x y"), ["torch: expected >=1, found x y"]),
        (required(driver=">=550"), found(), []),
        (required(driver=">=550"), found() | {"driver": "560.35.3"}, []),
        (required(driver=">=550"), found() | {"driver": "535.1"}, ["driver: expected >=550, found 535.1"]),
        (required(driver=">=550"), found() | {"driver": None}, ["driver: expected >=550, found none"]),
    ],
)
def test_required_and_found_are_compared_in_words(
    environment: Environment, there: dict[str, Any], words: list[str]
) -> None:
    assert check_required(environment, there) == words


def test_the_lock_file_must_have_its_frozen_bytes(tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_bytes(b"torch==2.13.0\n")
    lock = FileDigest(size=14, sha256=digest_of(b"torch==2.13.0\n"))
    wanted = required(lock="lock.txt")
    assert check_required(wanted, found(), lock=lock, root=tmp_path) == []
    (tmp_path / "lock.txt").write_bytes(b"torch==2.13.1\n")
    assert len(check_required(wanted, found(), lock=lock, root=tmp_path)) == 1
    (tmp_path / "lock.txt").unlink()
    assert check_required(wanted, found(), lock=lock, root=tmp_path)[0].endswith("found no such file")


def test_this_environment_meets_its_own_versions() -> None:
    there = find_environment()
    packages = {item["name"]: f"=={item['version']}" for item in there["distributions"]}
    assert check_required(required(python=f"=={platform.python_version()}", packages=packages), there) == []


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (required(packages={"torch": ">=2.11,<3", "numpy": ""}, driver=">=550", lock="env/lock.txt"), None),
        (required(python="3.11"), "python: expected version specifiers such as '>=3.11,<3.13', found '3.11'"),
        (required(packages={"torch": "2.13"}), "packages.torch: expected version specifiers"),
        (required(driver="new"), "driver: expected version specifiers"),
        (required(packages={"a-b": "", "A_b": ""}), "packages: a-b is named twice"),
        (required(lock="/etc/lock"), "lock: expected a path within the workspace"),
        (required(lock="../lock"), "lock: expected a path within the workspace"),
    ],
)
def test_the_form_of_what_is_required(environment: Environment, complaint: str | None) -> None:
    complaints = check_specifiers(environment)
    assert len(complaints) == (complaint is not None)
    assert all(words.startswith(complaint or "") for words in complaints)
