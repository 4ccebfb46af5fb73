"""TRL and PEFT as users run them, on the engine."""
