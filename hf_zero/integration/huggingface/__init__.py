"""What the objects of transformers and accelerate say, and what replaces them."""
