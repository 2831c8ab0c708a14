"""Selection of the largest magnitudes, index coding, gather and scatter."""
