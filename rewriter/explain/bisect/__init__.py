"""The first place at which a computation differs from what it should be: a pass, a layer, a module, a written file."""
