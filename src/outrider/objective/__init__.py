"""The objective room: hidden states and DraftBlocks in, LossTerms out; knows nothing of rows, models or optimizers."""
