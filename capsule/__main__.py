"""The command `capsule`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with a code of the README's table."""
    from capsule.cli.errors import guarded

    sys.exit(guarded(sys.argv[1:]))


if __name__ == "__main__":
    main()
