"""Imported modules: from the frozen sources with the frozen bytes, from an installed distribution, or a finding."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import capsule
from capsule import guest
from capsule.core.canonical import parse_lines
from capsule.core.digest import digest_of
from capsule.core.errors import MalformedError
from capsule.core.protocol import Sources
from capsule.host import environment, provenance, store
from capsule.host.provenance import Imported, ImportJudgement, SnapshotTree, judge_imports, read_imports
from capsule.host.source import scan_sources


def clear() -> None:
    environment.installed.cache_clear()
    provenance._record_index.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of distributions, the only one on the path where they are looked for."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    clear()
    yield folder
    clear()


def install(site: Path, name: str, files: dict[str, bytes], algorithm: str = "sha256") -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        encoded = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},{algorithm}={encoded},{len(data)}\n")
    (info / "RECORD").write_text("".join(lines))


def snapshot(tmp_path: Path, name: str, files: dict[str, bytes], links: dict[str, str] | None = None) -> SnapshotTree:
    work = tmp_path / f"{name}-work"
    for path, data in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(data)
    for path, target in (links or {}).items():
        (work / path).symlink_to(target)
    entries = scan_sources(work, Sources()).entries
    store.put_all(work, entries)
    store.materialise(work, entries, tmp_path / name)
    return SnapshotTree(tmp_path / name, entries)


def imported(path: Path, module: str = "m") -> Imported:
    return Imported(module, str(path), digest_of(path.read_bytes()))


def one(judgement: ImportJudgement) -> tuple[str, str, str | None]:
    (line,) = judgement.lines
    words = judgement.findings[0].words if judgement.findings else None
    return line.origin, line.name, words


def test_a_frozen_module_with_its_frozen_bytes(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"pkg/m.py": b"X = 1\n"})
    item = imported(tmp_path / "arm" / "pkg" / "m.py", "pkg.m")
    judgement = judge_imports([item], [tree])
    assert judgement.findings == ()
    assert parse_lines(judgement.to_bytes(), "x") == [
        {"module": "pkg.m", "origin": "source", "name": "pkg/m.py", "sha256": item.sha256}
    ]


def test_a_changed_or_added_file_of_a_snapshot_is_a_finding(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"m.py": b"X = 1\n"})
    path = tmp_path / "arm" / "m.py"
    changed = Imported("m", str(path), digest_of(b"X = 2\n"))
    assert one(judge_imports([changed], [tree])) == (
        "unknown",
        "m.py",
        "module m from arm/m.py does not hold its frozen bytes",
    )
    added = Imported("n", str(path.with_name("n.py")), digest_of(b""))
    assert one(judge_imports([added], [tree]))[2] == "module n from arm/n.py lies in the snapshot and is not frozen"
    unread = Imported("m", str(path), None)
    assert one(judge_imports([unread], [tree]))[0] == "unknown"


def test_one_arms_module_cannot_stand_in_for_anothers(tmp_path: Path) -> None:
    parent = snapshot(tmp_path, "parent", {"model.py": b"parent\n"})
    snapshot(tmp_path, "candidate", {"model.py": b"candidate\n"})
    judgement = judge_imports([imported(tmp_path / "candidate" / "model.py", "model")], [parent])
    words = "module model from candidate/model.py is neither frozen nor of an installed distribution"
    assert one(judgement) == ("unknown", "model.py", words)


def test_a_snapshot_whose_name_begins_like_anothers_is_another(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"m.py": b"X\n"})
    (tmp_path / "arm2").mkdir()
    (tmp_path / "arm2" / "m.py").write_bytes(b"X\n")
    assert one(judge_imports([imported(tmp_path / "arm2" / "m.py")], [tree]))[0] == "unknown"


def test_the_work_tree_is_not_the_snapshot(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"m.py": b"X\n"})
    judgement = judge_imports([imported(tmp_path / "arm-work" / "m.py")], [tree])
    assert len(judgement.findings) == 1
    assert judgement.findings[0].file == str(tmp_path / "arm-work" / "m.py")
    assert str(tmp_path) not in judgement.findings[0].words


def test_links_of_the_sources_lead_to_frozen_files(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m.py").write_bytes(b"outside\n")
    links = {"alias": "pkg", "m.py": "pkg/m.py", "away": "../out"}
    tree = snapshot(tmp_path, "arm", {"pkg/m.py": b"X\n"}, links)
    for path in ("alias/m.py", "m.py", "pkg/../pkg/m.py"):
        assert one(judge_imports([imported(tmp_path / "arm" / path)], [tree])) == ("source", "pkg/m.py", None)
    assert one(judge_imports([imported(tmp_path / "arm" / "away" / "m.py")], [tree]))[0] == "unknown"


def test_a_snapshot_may_be_reached_through_a_link(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"m.py": b"X\n"})
    (tmp_path / "short").symlink_to(tmp_path)
    linked = SnapshotTree(tmp_path / "short" / "arm", tree.entries.values())
    for root in (tmp_path, tmp_path / "short"):
        assert one(judge_imports([imported(root / "arm" / "m.py")], [linked]))[0] == "source"


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_module_of_a_distribution_by_its_record(site: Path, algorithm: str) -> None:
    install(site, "demo", {"demo/__init__.py": b"X = 1\n", "demo/fast.so": b"\x7fELF"}, algorithm)
    for name in ("__init__.py", "fast.so"):
        path = site / "demo" / name
        assert one(judge_imports([imported(path)], [])) == ("distribution", "demo", None)
        path.write_bytes(path.read_bytes().swapcase())
        words = f"module m from demo/{name} does not hold the bytes that demo was installed with"
        assert one(judge_imports([imported(path)], [])) == ("unknown", name, words)


def test_a_file_beside_distributions_is_of_none(site: Path) -> None:
    install(site, "demo", {"demo/__init__.py": b""})
    for name in ("demo/planted.py", "sitecustomize.py"):
        (site / name).write_bytes(b"")
        assert one(judge_imports([imported(site / name)], []))[0] == "unknown"


def test_a_record_without_a_hash_promises_nothing(site: Path) -> None:
    install(site, "demo", {"demo.py": b""})
    (site / "demo-1.0.dist-info" / "RECORD").write_text("demo.py,,\n")
    assert one(judge_imports([imported(site / "demo.py")], []))[0] == "unknown"


def test_the_bootstrap_of_a_virtual_environment_is_known(site: Path, tmp_path: Path) -> None:
    (site / "_virtualenv.py").write_bytes(b"")
    assert one(judge_imports([imported(site / "_virtualenv.py")], [])) == ("distribution", "virtualenv", None)
    (tmp_path / "_virtualenv.py").write_bytes(b"")
    assert one(judge_imports([imported(tmp_path / "_virtualenv.py")], []))[0] == "unknown"


def test_the_interpreter_and_the_tool_are_known() -> None:
    items = [imported(Path(json.__file__), "json"), imported(Path(guest.__file__), "__main__")]
    assert [(line.origin, line.name) for line in judge_imports(items, []).lines] == [
        ("tool", "capsule/guest.py"),
        ("stdlib", "__init__.py"),
    ]


def test_the_tools_own_package_may_be_frozen_too(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"capsule/__init__.py": Path(capsule.__file__).read_bytes()})
    assert one(judge_imports([imported(tmp_path / "arm" / "capsule" / "__init__.py")], [tree]))[0] == "source"


def test_packages_below_the_standard_library_are_not_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "_standard_folders", lambda: (str(tmp_path),))
    for name in ("m.py", "lib-dynload/m.so", "site-packages/m.py", "dist-packages/m.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = {name: one(judge_imports([imported(tmp_path / name)], []))[0] for name in ("m.py", "lib-dynload/m.so")}
    assert found == {"m.py": "stdlib", "lib-dynload/m.so": "stdlib"}
    for name in ("site-packages/m.py", "dist-packages/m.py"):
        assert one(judge_imports([imported(tmp_path / name)], []))[0] == "unknown"


def test_a_module_without_a_file_has_no_line() -> None:
    assert judge_imports([Imported("sys", None, None)], []) == ImportJudgement((), ())


def test_lines_are_in_order_of_names_and_name_no_place(tmp_path: Path) -> None:
    tree = snapshot(tmp_path, "arm", {"b.py": b"", "a.py": b""})
    items = [imported(tmp_path / "arm" / "b.py", "b"), imported(tmp_path / "arm" / "a.py", "a")]
    items += [imported(tmp_path / "arm-work" / "a.py", "z")]
    judgement = judge_imports(items, [tree])
    assert [line.module for line in judgement.lines] == ["a", "b", "z"]
    assert str(tmp_path) not in judgement.to_bytes().decode()


@pytest.mark.parametrize("sha256", ["", "sha256:xyz", "md5:00"])
def test_a_digest_in_the_wrong_form_is_no_digest(site: Path, sha256: str) -> None:
    install(site, "demo", {"demo.py": b""})
    assert one(judge_imports([Imported("demo", str(site / "demo.py"), sha256)], []))[0] == "unknown"


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"module":1,"file":null,"sha256":null}', '{"module":"m","file":[],"sha256":null}', "x"]
)
def test_a_malformed_report_is_refused(line: str) -> None:
    with pytest.raises(MalformedError, match="report:2"):
        read_imports(b'{"file":null,"module":"m","sha256":null}\n' + line.encode() + b"\n", "report")


def test_what_a_real_process_reports_is_judged_whole(tmp_path: Path) -> None:
    """A trial that imports its own code, the standard library and a distribution, and one file from nowhere."""
    tree = snapshot(tmp_path, "arm", {"trial.py": b"import json, packaging.version, stray\n"})
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "stray.py").write_bytes(b"")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'arm')!r}, {str(tmp_path / 'stray')!r}]\nimport trial\n"
        "from capsule.guest import imported_modules, _line\n"
        "sys.stdout.buffer.write(b''.join(_line(item) for item in imported_modules()))"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(capsule.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environ)
    judgement = judge_imports(read_imports(done.stdout, "report"), [tree])
    origins = {line.module: line.origin for line in judgement.lines}
    assert [finding.module for finding in judgement.findings] == ["stray"]
    assert (origins["trial"], origins["json"], origins["packaging.version"]) == ("source", "stdlib", "distribution")
    assert origins["capsule.guest"] == "tool"


def test_the_index_of_recorded_files_looks_at_each_folder_of_distributions_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are tens of thousands of files, and every attempt of a Python trial waits for it."""
    looked: list[str] = []
    real = os.path.realpath
    monkeypatch.setattr(provenance.os.path, "realpath", lambda path: looked.append(path) or real(path))
    index = provenance._record_index.__wrapped__()
    assert len(looked) <= len(list(importlib.metadata.distributions())) < len(index)
