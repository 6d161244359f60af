"""The work of each subcommand of `gapless`. Loaded when called, so that `--help` does not wait for torch."""

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130  # what `cli` says of them holds for all commands
