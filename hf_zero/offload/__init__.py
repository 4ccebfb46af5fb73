"""What an engine keeps elsewhere: vectors in host memory and on drives, and where each of them goes."""
