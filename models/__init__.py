"""What is this model? `ModelSpec` from a config, one short file per family, and importers."""
