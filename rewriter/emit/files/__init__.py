"""Files of an output directory: planned from a program, written beside their final place, renamed when complete."""
