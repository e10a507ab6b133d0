"""Text generation: prefill, decode steps and what compiles them, and the processes that run them."""
