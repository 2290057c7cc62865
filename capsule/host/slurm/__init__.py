"""Attempts as jobs of a Slurm cluster: an engine behind the same attempt, not a second kind of one.

The batch step runs the same supervisor as an attempt on this machine, which writes the same ledger; Slurm's accounting
is a second witness of what the attempt cost, and the larger figure is debited.
"""
