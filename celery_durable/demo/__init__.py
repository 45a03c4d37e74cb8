"""``make demo``: the main job shown on real servers, with a few of them killed on the way."""
