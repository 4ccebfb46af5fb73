"""The sections that choose an optimizer and a schedule: their types, and the arguments that each takes."""
