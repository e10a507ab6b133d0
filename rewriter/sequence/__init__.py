"""Positions of a sequence: which keys a query sees, which rank holds which tokens, how attention finds other keys.

Below the compiler and the runtime, which share these definitions: arithmetic of positions, without torch.distributed.
"""
