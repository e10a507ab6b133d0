"""The rest of a cluster, emulated at the collective boundary: a torch.distributed backend."""
