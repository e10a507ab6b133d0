"""What a recipe gains on a fabric, before anyone rents it: prediction from a config alone, without a GPU."""
