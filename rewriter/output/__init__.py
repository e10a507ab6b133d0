"""Contents of an output directory as it declares them; read by the compiler and by the ranks of the runtime."""
