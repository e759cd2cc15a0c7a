"""What `keras-ccp` runs: from a configuration to models, scores, pages and search."""
