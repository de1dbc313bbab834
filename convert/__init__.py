"""Port weights of other formats to MLX folders. Knows files and tensors, nothing of decoding."""
