"""Preregistered experiments and evidence capsules: freeze, run, pack, verify, replay.

A trial script needs one name from here, `record`; everything else is the command `capsule`. Importing this package
costs nothing: `record` lives in the stdlib-only module that runs inside trials and is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capsule.guest import record

__all__ = ["__version__", "record"]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name == "record":
        from capsule.guest import record

        return record
    raise AttributeError(f"module 'capsule' has no attribute {name!r}")
