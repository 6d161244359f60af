"""Which files `gapless run` reads and writes: how rows lie in a file, and what a row says. No torch."""
