"""The small trained models that come with the package, a folder each; written by analyses/08_small_models."""
