"""What the engine reports about itself: metrics, load, hot prefixes; and of each request a line and spans."""
