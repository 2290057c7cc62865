"""Words and pixels: arguments in, text or JSON out. The only layer that prints, and the only one that exits."""
