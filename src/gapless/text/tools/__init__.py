"""How models write calls of tools: one file a format (docs/tools.md says how to add one). No torch."""
