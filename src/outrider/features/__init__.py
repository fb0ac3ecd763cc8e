"""The features room: the frozen target. TokenRows in, Features out; also its embedding, its head and its answers."""
