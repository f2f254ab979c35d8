"""Multi-head latent attention of a layer, and how a pass attends to latents."""
