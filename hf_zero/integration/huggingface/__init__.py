"""Views of objects of transformers and accelerate, and their replacements."""
