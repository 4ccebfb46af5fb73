"""An empty module: LLaMA-Factory imports torchaudio for audio data, and its builds do not load with a CPU torch."""
