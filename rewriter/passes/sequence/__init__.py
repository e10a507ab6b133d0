"""Plans for attention over tokens that ranks share: bytes, memory, time."""
