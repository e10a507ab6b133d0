"""What this machine has, which commands will work on it, and what is missing."""
