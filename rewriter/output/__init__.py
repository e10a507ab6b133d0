"""What an output directory says of itself; read by the compiler and by the ranks of the runtime."""
