"""Pictures in SVG: curves, histograms, steps."""
