"""GR00T-N1.7 on TorchServe: wire -> observation -> wave -> policy -> model, and back."""
