"""The sharded step: agreement between ranks, the update, and the assembly of an engine's parts."""
