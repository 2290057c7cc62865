"""The root of every error this package raises on purpose."""


class ExperimentError(Exception):
    """Bad input, a broken schedule contract or an unusable checkpoint; the message names what was found."""
