"""One normal form of a model's facts, one decoder assembled from it; a family only translates its config.json."""
