"""Communication between ranks: messages, process groups, all-reduces with gradients, and the log of them."""
