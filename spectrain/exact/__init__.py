"""Pure mathematics of lossless speculative decoding: no models, no RNG, no cache."""
