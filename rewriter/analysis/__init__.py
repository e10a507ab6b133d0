"""Read-only questions to a Program."""
