"""Nothing: LLaMA-Factory imports torchaudio for data with sound, and its builds do not load beside a torch for CPUs."""
