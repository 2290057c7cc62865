"""The command `capsule`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with a code of the README's table."""
    # The import system's sign for a module that is not there. pyarrow loads numpy where it can, for conversions that
    # nothing here asks for: 13 MiB, and more time than all the rest of it.
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]
    try:
        from capsule.cli.errors import guarded

        code = guarded(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
