"""What the subcommands of `gapless` do. Each is loaded when it is called, so that `--help` does not wait for torch."""
