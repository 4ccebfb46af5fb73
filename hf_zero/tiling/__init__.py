"""Tiled compute: what looks at each token alone runs over a few tokens at a time, so that memory does not grow."""
