"""The model room: single-device maths of the drafter. Embeddings, features, positions and masks in, hidden states out."""
