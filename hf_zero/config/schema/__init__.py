"""The sections of a config: a file has the keys of some, the rules about them, and what they make of it: a policy."""
