"""What every room may need: errors, suggestions, YAML with lines, versions, numbers as text. No torch."""
