"""Speed as ratios: each figure beside its anchor, measured in the same run on servers of the benchmark's own."""
