"""A conversation in the terminal: `gapless chat`. Knows no engine: a `Partner` answers."""
