"""Completion scripts, as Typer makes them."""

from __future__ import annotations

import contextlib
import io

from capsule.core.errors import UsageError

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return the completion script of a shell.

    Raises:
        UsageError: there is none for that shell.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined,unused-ignore]

    if shell not in SHELLS:
        raise UsageError(f"expected one of {', '.join(SHELLS)}, found {shell!r}")
    with contextlib.redirect_stdout(io.StringIO()):
        return str(get_completion_script(prog_name="capsule", complete_var="_CAPSULE_COMPLETE", shell=shell))
