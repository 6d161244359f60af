"""`python -m gapless`: the same as the command `gapless`."""

from __future__ import annotations

import sys

from gapless.cli import main

sys.exit(main())
