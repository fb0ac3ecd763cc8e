"""The layout room: pure functions on integers. TokenRows in, anchors, blocks and the visibility rule out; no model, no files."""
