"""SVG pictures: curves, histograms and steps."""
