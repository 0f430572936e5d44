"""Publishing a bundle to the Hub: asked for, gathered and checked here, sent in one commit, read back."""
