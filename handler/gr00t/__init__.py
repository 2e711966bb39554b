"""The GR00T N1.7 network: `model` is the forward, `checkpoint` reads its weights."""
