"""What a model is and does: inspected, compared with another one, bisected for the place where it goes wrong."""
