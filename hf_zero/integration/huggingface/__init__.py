"""What the objects of transformers and accelerate say, and what stands in their place."""
