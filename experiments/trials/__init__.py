"""Trial functions: each computes one planned cell and returns its observations by name."""
