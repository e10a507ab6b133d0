"""`python -m rewriter.cli` is `rewrite`, where the console script is not on the path."""

from __future__ import annotations

import sys

from rewriter.cli import main

sys.exit(main())
