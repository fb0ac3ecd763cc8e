"""The doctor: a record of an out-of-memory, or a pasted log, or a machine in; causes and ways out in a ledger's lines out."""
