"""This machine: clock, workspace, sources, environment, ledger file, device leases, launching. Knows no archive."""
