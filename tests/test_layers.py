"""The layers are visible in the imports, and imports point down only."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "capsule"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)

ALLOWED = {
    "core": {"core"},
    "host": {"host", "core", "guest"},
    "archive": {"archive", "core"},
    "steps": {"steps", "host", "archive", "core"},
    "cli": {"cli", "steps", "host", "core"},
    "guest": set(),
    "__init__": {"guest"},
    "__main__": {"cli"},
}
CORE_LIBRARIES = {"pydantic", "rfc8785"}
CORE_FORBIDDEN = {"os", "time", "random", "secrets", "socket", "subprocess", "pathlib", "shutil", "tempfile", "io"}
VERIFY_ROOMS = {"core", "archive"}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    """A file imports from its own layer and those below it, and never from experiments."""
    for name in imported(path):
        parts = name.split(".")
        assert parts[0] != "experiments", f"{path} imports {name}"
        if parts[0] == "capsule" and len(parts) > 1 and parts[1] not in ("__version__",):
            assert parts[1] in ALLOWED[room(path)], f"{path} imports {name}"


def test_core_is_pure() -> None:
    """The core imports nothing that could touch a file, a clock or chance, and two libraries only."""
    for path in (PACKAGE / "core").glob("*.py"):
        for name in imported(path):
            top = name.split(".")[0]
            assert top not in CORE_FORBIDDEN, f"{path} imports {name}"
            assert top in CORE_LIBRARIES | {"capsule"} | sys.stdlib_module_names, f"{path} imports {name}"


def test_verify_needs_core_and_archive_only() -> None:
    """Everything that `verify` imports, directly or not, is core or archive: no host, nothing Linux-only."""
    todo, seen = [PACKAGE / "steps" / "verify.py"], set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "capsule" or len(parts) < 3:
                assert parts[0] not in ("fcntl", "resource", "torch"), f"{path} imports {name}"
                continue
            assert parts[1] in VERIFY_ROOMS, f"{path} imports {name}"
            target = PACKAGE / parts[1] / f"{parts[2]}.py"
            if target.exists() and target not in seen:
                todo.append(target)


def test_guest_needs_only_the_standard_library() -> None:
    """What runs inside a trial's process imports nothing that a trial might have in another version."""
    for name in imported(PACKAGE / "guest.py"):
        assert name.split(".")[0] in sys.stdlib_module_names, name


def test_every_source_file_is_in_a_layer() -> None:
    """No file lies outside the rooms."""
    assert {room(path) for path in FILES} <= set(ALLOWED)
