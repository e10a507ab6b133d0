"""A soak that stays: random and damaged inputs, programs, kills, disks and ranks, for as many hours as there are.

    make soak HOURS=1

Each kind of case is a file: `inputs`, `programs`, `kills`, `disks`, `ranks`. A case follows from its kind and number
alone, so that every failure can be repeated by the command that is printed with it.
"""
