"""One verb, one file: each joins core with host or archive, returns values and prints nothing."""
