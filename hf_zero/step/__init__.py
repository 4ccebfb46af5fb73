"""The sharded step: what ranks agree on, the update, and what is put together for it."""
