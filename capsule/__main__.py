"""The command `capsule`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with a code of the README's table."""
    try:
        from capsule.cli.errors import guarded

        code = guarded(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
