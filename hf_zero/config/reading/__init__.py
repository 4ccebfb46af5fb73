"""A config as text: JSON with comments, Hjson, base64, and the place of every key."""
