"""Gains of recipes on a fabric, before anyone rents it: predicted from a config alone, without a GPU."""
