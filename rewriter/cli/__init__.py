"""The command `rewrite`. One file per command; each imports what it needs when it runs, so that help is instant."""

from rewriter.cli.app import main

__all__ = ["main"]
