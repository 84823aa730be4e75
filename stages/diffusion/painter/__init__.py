"""The painter: a small diffusion transformer that draws from the keys and values of a frozen language model."""
