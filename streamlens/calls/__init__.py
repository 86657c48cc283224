"""The public calls: prompts in, a tidy table out. Each one parses, batches, measures and hands arrays to `frames`."""
