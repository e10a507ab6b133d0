"""Files of an output directory: planned from a program, written next to their final place, renamed when complete."""
