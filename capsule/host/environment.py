"""What runs the experiment: the interpreter, its platform and every installed distribution; and what was required.

The description goes into capsules, so it names no host, user, home or absolute path, and of environment variables it
gives values only from a short list. Distributions are compared with the RECORD that their installer wrote: the size of
every file and the SHA-256 of every `.py`; hashing compiled libraries too would read gigabytes. An imported file is
checked by digest whatever it is (`capsule.host.provenance`).
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import site
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from capsule.core.digest import digest_of
from capsule.core.manifest import FileDigest
from capsule.core.protocol import Environment

CHECKED = "the size of every file in RECORD and the SHA-256 of every .py among them"
NAMED_MAX = 50
"""How many files of one kind are named; the rest is counted."""

VARIABLES_SHOWN = frozenset(
    "CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES LANG "
    "LC_ALL MKL_NUM_THREADS NCCL_P2P_DISABLE NUMEXPR_NUM_THREADS NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS "
    "OPENBLAS_NUM_THREADS PYTHONHASHSEED PYTHONOPTIMIZE PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF "
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TZ".split()
)
_VARIABLE_SHOWN = re.compile(r"[A-Za-z0-9_.,:;=+-]{0,200}|[A-Z][A-Za-z_]{1,40}/[A-Z][A-Za-z_]{1,40}")
"""Words, numbers, lists of them, and the name of a time zone."""
_VARIABLES_NAMED = re.compile(
    r"(?:CUBLAS|CUDA|CUDNN|GOMP|HF|KMP|LD|MALLOC|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PYTORCH|TORCH|TRITON|XLA)_[A-Z0-9_]+"
    r"|PYTHON[A-Z0-9_]+"
)


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """One line of a RECORD: the distribution, the path as its RECORD gives it, the hash as `sha256=…`, and the size."""

    distribution: str
    path: str
    hash: str
    size: int | None


def find_environment() -> dict[str, Any]:
    """Return a description of this process's environment as JSON of strings, integers, booleans and lists.

    Devices and drivers are the caller's to add. Distributions are read once per process.
    """
    return {
        "interpreter": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": Path(sys.executable).name,
            "virtual_environment": sys.prefix != sys.base_prefix,
        },
        "platform": {
            "system": platform.system(),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "processors": os.cpu_count() or 0,
        },
        "checked": CHECKED,
        "distributions": [dict(item) for item in _distributions()],
        "startup": _startup_files(),
        "variables": variables_shown(os.environ),
        "variables_present": variables_present(os.environ),
    }


def check_specifiers(environment: Environment) -> list[str]:
    """Return what is wrong with the form of the required environment; an empty list if it can be frozen."""
    specifiers = {"python": environment.python, "driver": environment.driver or ""}
    specifiers |= {f"packages.{name}": text for name, text in environment.packages.items()}
    complaints = []
    for key, text in specifiers.items():
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            complaints.append(f"{key}: expected version specifiers such as '>=3.11,<3.13', found {text!r}")
    normal = [normalised(name) for name in environment.packages]
    complaints += [f"packages: {name} is named twice" for name in sorted({x for x in normal if normal.count(x) > 1})]
    if environment.lock is not None and (environment.lock.startswith("/") or ".." in environment.lock.split("/")):
        complaints.append(f"lock: expected a path within the workspace, found {environment.lock!r}")
    return complaints


def check_required(
    environment: Environment, found: Mapping[str, Any], *, lock: FileDigest | None = None, root: Path | None = None
) -> list[str]:
    """Return in words how what was found is not what is required; an empty list if it is.

    `found` is `find_environment`'s, with a `driver` (its version, or None) where a device needs one; without that key
    the driver is not judged. With `lock` and `root` the lock file must still have its frozen bytes.
    """
    words = _mismatch("python", environment.python, found["interpreter"]["version"])
    versions = {normalised(item["name"]): item["version"] for item in found["distributions"]}
    for name, specifiers in environment.packages.items():
        words += _mismatch(name, specifiers, versions.get(normalised(name)))
    if environment.driver is not None and "driver" in found:
        words += _mismatch("driver", environment.driver, found["driver"])
    if environment.lock is not None and lock is not None and root is not None:
        path = root / environment.lock
        digest = digest_of(path.read_bytes()) if path.is_file() else "no such file"
        if digest != lock.sha256:
            words.append(f"lock file {environment.lock}: expected {lock.sha256}, found {digest}")
    return words


def _mismatch(name: str, specifiers: str, version: str | None) -> list[str]:
    wanted = specifiers or "any version"
    if version is None:
        return [f"{name}: expected {wanted}, found none"]
    try:
        meets = SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        meets = not specifiers
    return [] if meets else [f"{name}: expected {wanted}, found {version}"]


def normalised(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def variables_shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values are recorded; a value that could be a path or a text is left out."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in VARIABLES_SHOWN and _VARIABLE_SHOWN.fullmatch(value)
    }


def variables_present(environ: Mapping[str, str]) -> list[str]:
    """Return the names, never the values, of further variables that change what a program does (`LD_PRELOAD`, …)."""
    shown = variables_shown(environ)
    return sorted(name for name in environ if name not in shown and _VARIABLES_NAMED.fullmatch(name))


@functools.cache
def installed() -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions by normalised name; the first on the path is the one that is imported."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normalised(name), distribution)
    return found


def recorded_files(distribution: importlib.metadata.Distribution) -> Iterator[RecordedFile]:
    """Yield the lines of a distribution's RECORD; none where the installer left no RECORD."""
    name = distribution.metadata["Name"]  # parsed anew each time
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if len(row) == 3:
            yield RecordedFile(name, row[0], row[1], int(row[2]) if row[2].isdigit() else None)


def matches_record(data: bytes, record: RecordedFile) -> bool:
    """Whether these bytes are the ones that RECORD promises; a line without a hash promises nothing."""
    algorithm, _, encoded = record.hash.partition("=")
    if algorithm not in ("sha256", "sha384", "sha512"):
        return False
    digest = hashlib.new(algorithm, data).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == encoded.rstrip("=")


@functools.cache
def _distributions() -> tuple[dict[str, Any], ...]:
    return tuple(_described(distribution) for _, distribution in sorted(installed().items()))


def _described(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    base = str(distribution.locate_file(""))
    changed: list[str] = []
    missing: list[str] = []
    unhashed: list[str] = []
    files = 0
    for record in recorded_files(distribution):
        path = f"{base}/{record.path}"
        if record.path.endswith(".pyc"):
            unhashed += _odd_bytecode(record.path, path)
            continue
        files += 1
        try:
            if not _is_as_recorded(path, record):
                changed.append(_short(record.path))
        except OSError:
            missing.append(_short(record.path))
    return {
        "name": distribution.metadata["Name"],
        "version": distribution.version,
        "editable": _is_editable(distribution),
        "files": files,
        "changed": _first(changed),
        "missing": _first(missing),
        "unhashed_pyc": _first(unhashed),
    }


def _is_as_recorded(path: str, record: RecordedFile) -> bool:
    if record.size is not None and os.stat(path).st_size != record.size:  # noqa: PTH116 - tens of thousands of them
        return False
    return not (record.path.endswith(".py") and record.hash) or matches_record(_bytes(path), record)


def _bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - the same
        return file.readall()


def _odd_bytecode(name: str, path: str) -> list[str]:
    """Name bytecode that the interpreter would run without a look at a source: no source, or an unchecked hash."""
    if "__pycache__/" not in name:
        return [_short(name)]
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - the same
            flags = int.from_bytes(file.read(8)[4:], "little")
    except OSError:
        return []
    return [_short(name)] if flags == 1 else []


def _is_editable(distribution: importlib.metadata.Distribution) -> bool:
    try:
        described = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(described.get("dir_info", {}).get("editable"))


def _short(path: str) -> str:
    """Return a path of RECORD, or only its last name where it is absolute."""
    return path.rpartition("/")[2] if path.startswith("/") else path


def _first(names: list[str]) -> list[str]:
    return sorted(names)[:NAMED_MAX] + ([f"and {len(names) - NAMED_MAX} more"] if len(names) > NAMED_MAX else [])


def _startup_files() -> list[dict[str, str]]:
    """Return what runs at every start besides the interpreter: `.pth` files and `sitecustomize`, by name and digest."""
    folders = [Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())]
    files = {path for folder in folders if folder.is_dir() for path in folder.glob("*.pth")}
    for name in ("sitecustomize", "usercustomize"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and Path(spec.origin).is_file():
            files.add(Path(spec.origin))
    return sorted(
        ({"name": path.name, "sha256": digest_of(path.read_bytes())} for path in files), key=lambda item: item["name"]
    )
