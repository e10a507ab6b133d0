"""Does a rewritten model compute what it should: independent references, tiny models, comparison."""
